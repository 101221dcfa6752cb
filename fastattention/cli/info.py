"""`fastattention info`: hardware, versions, backends with their reasons, environment."""

from __future__ import annotations

import inspect
import os
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from fastattention import environment
from fastattention.attention.backend import ATTENTION_BACKENDS
from fastattention.cli.console import OUTPUT
from fastattention.cli.machine import describe_machine


def info() -> None:
    """Print everything that a bug report should hold."""
    OUTPUT.print(_machine_table(describe_machine()), _backend_table(), _environment_table(), sep="\n")


def environment_variables() -> dict[str, str]:
    """Name -> meaning of every variable the package reads: functions of environment.py document them, name first."""
    documents = (inspect.getdoc(function) or "" for _, function in inspect.getmembers(environment, inspect.isfunction))
    pairs = (document.partition(": ") for document in documents)
    return {name: " ".join(meaning.split()) for name, _, meaning in pairs if name.startswith("FASTATTENTION_")}


def _table(title: str, *columns: str) -> Table:
    table = Table(*columns, title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.show_header = bool(columns[0])
    return table


def _machine_table(machine: dict[str, Any]) -> Table:
    table = _table("machine", "", "")
    rows = {
        "system": machine["system"],
        "processor": machine["cpu"],
        "instruction sets": " ".join(machine["cpu_flags"]) or "none of interest",
        "usable CPUs": f"{machine['cpus_usable']}, of which fastattention uses {machine['num_threads']}",
        "memory": f"{machine['memory_bytes'] / 2**30:.1f} GiB",
        "GPUs": ", ".join(machine["gpus"]) or "none that torch can see",
        "python": machine["python"],
        **{name: found or "not installed" for name, found in machine["versions"].items()},
        "source commit": machine["commit"] or "none: an installed package",
    }
    for name, value in rows.items():
        table.add_row(name, escape(value))
    return table


def _backend_table() -> Table:
    table = _table("backends, in the order in which they are tried", "name", "state", "runs on, or why it does not")
    for name in ATTENTION_BACKENDS.order:
        backend = ATTENTION_BACKENDS.get(name)
        reason = backend.why_unavailable()
        state = "[green]available[/]" if reason is None else "[yellow]unavailable[/]"
        table.add_row(name, state, escape(backend.describe() if reason is None else reason))
    return table


def _environment_table() -> Table:
    table = _table("environment", "variable", "value", "meaning")
    table.columns[0].no_wrap = True
    for name, meaning in environment_variables().items():
        table.add_row(name, escape(os.environ.get(name) or "not set"), escape(meaning))
    return table
