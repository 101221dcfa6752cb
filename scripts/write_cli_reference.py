"""Writes docs/reference/cli.md from the command line's own options.

    python scripts/write_cli_reference.py

A test compares the page with the output of this script.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import typer
from typer.models import ArgumentInfo

from fastattention.cli import main

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "cli.md"
INTRODUCTION = """# Command line

Installing the package installs the command `fastattention`. `fastattention COMMAND --help` shows the same options.
"""


def render() -> str:
    """The whole page."""
    commands = [*_commands(main.app, "fastattention"), *_commands(main.plan, "fastattention plan")]
    overview = "".join(f"| [`{name}`](#{_anchor(name)}) | {_summary(function)} |\n" for name, function in commands)
    sections = (_section(name, function) for name, function in commands)
    return "\n".join([INTRODUCTION, f"| command | what it does |\n|---|---|\n{overview}", *sections])


def _commands(app: typer.Typer, prefix: str) -> list[tuple[str, Callable[..., Any]]]:
    found = []
    for command in app.registered_commands:
        assert command.callback is not None
        found.append((f"{prefix} {command.name or command.callback.__name__}", command.callback))
    return found


def _anchor(name: str) -> str:
    return name.replace(" ", "-")


def _summary(function: Callable[..., Any]) -> str:
    return (inspect.getdoc(function) or "").split("\n\n")[0].replace("\n", " ")


def _section(name: str, function: Callable[..., Any]) -> str:
    text = f"## {name}\n\n{inspect.getdoc(function)}\n"
    rows = "".join(_rows(function))
    return f"{text}\n| option | default | meaning |\n|---|---|---|\n{rows}" if rows else text


def _rows(function: Callable[..., Any]) -> Iterator[str]:
    hints = typing.get_type_hints(function, include_extras=True)
    for name, parameter in inspect.signature(function).parameters.items():
        if hints[name] is typer.Context:  # stands for the options of another command
            continue
        kind, info = typing.get_args(hints[name])
        given = [each for each in (info.default, *(info.param_decls or ())) if str(each).startswith("-")]
        option = "`, `".join(
            given or [name.upper() if isinstance(info, ArgumentInfo) else f"--{name.replace('_', '-')}"]
        )
        yield f"| `{option}` | {_default(parameter.default)} | {info.help}{_choices(kind)} |\n"


def _default(value: object) -> str:
    if value is inspect.Parameter.empty:
        return "required"
    if value is None or value is False:
        return ""
    return f"`{value.value if isinstance(value, Enum) else value}`"


def _choices(kind: Any) -> str:
    """The values of an enumeration, in brackets."""
    kinds = typing.get_args(kind) if typing.get_origin(kind) in (types.UnionType, typing.Union, list) else (kind,)
    allowed = [member.value for each in kinds if isinstance(each, type) and issubclass(each, Enum) for member in each]
    return f" One of {', '.join(f'`{value}`' for value in allowed)}." if allowed else ""


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
