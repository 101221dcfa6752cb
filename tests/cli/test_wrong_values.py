"""Every option of every command, given wrong values: a message that names the option, status 1 or 2, no traceback.

The options are read from the app: a new one is tried automatically, or needs wrong values in TEXTS.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import NamedTuple, get_args, get_type_hints

import pytest
import typer
from typer.models import ArgumentInfo

from fastattention.cli import main

from .conftest import RunCommand

NOT_UTF8 = b"\xff".decode(errors="surrogateescape")
NUMBERS = ("", "x", "1.5e", "nan", "-1", str(10**30))

# The options that a command needs besides the wrong one. MODEL is a folder with a model.
NEEDED = {
    "info": "",
    "check": "",
    "bench": "model",
    "generate": "--model=MODEL --prompt=x --max-new-tokens=1",
    "demo": "--model=MODEL --new-tokens=1",
    "serve": "MODEL",
    "export-kernel": "",
    "compile": "--arch=80 --headdim=64 --output=kernel.cubin",
    "warmup": "",
    "plan ascend": "--seqlen=256",
    "plan offload": "--model=llama-3-8b --gpu-memory=20GiB --seqlen=4096",
    "plan allreduce": "--model=llama-2-7b --tp=2 --seqlen=1024",
    "plan traffic": "--seqlen=256",
}

SIZES = ("", "x", "16Gb", "16gib", "-1GB", "16", "1e30", NOT_UTF8)
RATES = ("0GB/s", *(f"{size}/s" for size in SIZES if size != "16"))
FILES = (".", "", "folder.png", "nowhere/file.png", "file/file.png", "/proc/file.png", "x" * 300 + ".png")
DEVICES = ("", "nothing", "meta", "cuda:99", "cuda:x", "cpu:-3", "mps", "xla", "vulkan", "lazy", "hpu", NOT_UTF8)
TEXTS = {
    "check output": (*FILES, "/dev/null"),
    "bench questions": ("", "everything", NOT_UTF8),
    "bench model": ("", "nowhere", "file", "damaged", "llama-2-7b/3", NOT_UTF8),
    "bench output": ("file", "file/folder", "/proc/folder", "x" * 300),
    "export-kernel folder": ("", "file", "file/folder", "/proc/folder", "x" * 300, "a:b"),
    "serve model": ("", "file", "damaged", "weightless", NOT_UTF8),
    "serve host": ("nowhere.invalid", "x" * 300, NOT_UTF8),
    "serve name": ("", NOT_UTF8),
    "serve device": DEVICES,
    "serve api_key": ("", NOT_UTF8),
    "serve max_request_bytes": tuple(size for size in SIZES if size != "16"),
    "serve kv_memory": tuple(size for size in SIZES if size != "16"),
    "serve cpu_kv_memory": tuple(size for size in SIZES if size != "16"),
    "generate model": ("", "nowhere", "file", "damaged", "weightless", NOT_UTF8),
    "generate prompt": (NOT_UTF8,),
    "generate device": DEVICES,
    "generate kv_budget": SIZES,
    "demo file": ("", ".", "x" * 300, "nowhere", "empty", "binary", NOT_UTF8),
    "demo model": ("", "nowhere", "file", "x" * 300, NOT_UTF8),
    "compile output": FILES,
    "warmup device": (*DEVICES, "cpu"),
    "plan ascend dtype": ("", "float8", NOT_UTF8),
    "plan ascend chip": ("", "A100", NOT_UTF8),
    "plan ascend output": (*FILES, "plan", "plan.pdf"),
    "plan offload model": ("", "gpt", NOT_UTF8),
    "plan offload hardware": ("", "abacus", NOT_UTF8),
    "plan offload policy": ("", "guess", NOT_UTF8),
    "plan offload gpu_memory": SIZES,
    "plan offload cpu_memory": tuple(size for size in SIZES if size != "16"),
    **{f"plan offload {name}_bandwidth": RATES for name in ("gpu", "link", "cpu", "dram")},
    "plan offload output": (*FILES, "plan", "plan.pdf"),
    "plan allreduce model": ("", "gpt", NOT_UTF8),
    "plan allreduce hardware": ("", "abacus", NOT_UTF8),
    "plan allreduce output": (*FILES, "plan", "plan.pdf"),
    "plan traffic gpu": ("", "A10", NOT_UTF8),
}


class Parameter(NamedTuple):
    """An option of a command, or its argument."""

    command: str
    name: str
    kind: type
    flag: str | None  # None for an argument

    @property
    def wrong_values(self) -> tuple[str, ...]:
        """Wrong values, by the type of the parameter."""
        if self.kind is bool:
            return ("1",)
        if issubclass(self.kind, Enum):
            return ("", "nothing", NOT_UTF8)
        return NUMBERS if self.kind in (int, float) else TEXTS[f"{self.command} {self.name}"]


def parameters(app: typer.Typer, prefix: str = "") -> Iterator[Parameter]:
    """The parameters of every command."""
    for command in app.registered_commands:
        assert command.callback is not None
        name = prefix + (command.name or command.callback.__name__)
        for parameter, hint in get_type_hints(command.callback, include_extras=True).items():
            if parameter == "return" or hint is typer.Context:
                continue
            annotated, info = get_args(hint)
            kinds = [kind for kind in get_args(annotated) or [annotated] if kind is not type(None)]
            (kind,) = get_args(kinds[0]) or kinds  # the member type of a list
            flags = [flag for flag in info.param_decls or () if flag.startswith("--")]
            is_argument = isinstance(info, ArgumentInfo)
            yield Parameter(
                name, parameter, kind, None if is_argument else [*flags, f"--{parameter}"][0].replace("_", "-")
            )


COMMANDS = [command.name or command.callback.__name__ for command in main.app.registered_commands if command.callback]
COMMANDS += [f"plan {command.name}" for command in main.plan.registered_commands]
PARAMETERS = [*parameters(main.app), *parameters(main.plan, "plan ")]


@pytest.fixture
def surroundings(tmp_path: Path, byte_model: Path) -> str:
    """Makes the files that wrong values name, in the folder where commands run. Gives the path of the right model."""
    for name in ("folder.png", "damaged", "weightless"):
        (tmp_path / name).mkdir()
    (tmp_path / "file").write_text("text")
    (tmp_path / "empty").write_text("")
    (tmp_path / "binary").write_bytes(b"\xff" * 10_000)
    (tmp_path / "damaged" / "config.json").write_text('{"model_type": "llama", "hidden_size": "many"}')
    (tmp_path / "weightless" / "config.json").write_text((byte_model / "config.json").read_text())
    return str(byte_model)


def test_every_command_is_tried() -> None:
    assert set(NEEDED) == set(COMMANDS)
    texts = {f"{one.command} {one.name}" for one in PARAMETERS if one.kind in (str, Path)}
    assert texts == set(TEXTS)


@pytest.mark.parametrize("parameter", PARAMETERS, ids=lambda one: f"{one.command} {one.name}".replace(" ", "-"))
def test_a_wrong_value_is_refused_by_name(parameter: Parameter, run_command: RunCommand, surroundings: str) -> None:
    needed = [option.replace("MODEL", surroundings) for option in NEEDED[parameter.command].split()]
    others = [option for option in needed if not option.startswith(f"{parameter.flag}=")]
    if parameter.flag is None:
        others = [option for option in others if option.startswith("--")]
    names = (parameter.flag, parameter.name) if parameter.flag else (parameter.name.rstrip("s"),)
    for value in parameter.wrong_values:
        given = f"{parameter.flag}={value}" if parameter.flag else value
        exit_code, output = run_command(*parameter.command.split(), *others, given)
        assert exit_code in (1, 2), (given, output)
        assert exit_code == 2 or output.startswith("error: "), (given, output)  # before any work
        assert "Traceback" not in output, (given, output)
        assert any(name in output for name in names), (given, output)


@pytest.mark.parametrize("command", ["", *COMMANDS, "plan"])
def test_what_no_command_takes_is_refused(command: str, run_command: RunCommand) -> None:
    # An option that serve does not know may be one of Transformers' server, which parses it when there is a model.
    exit_code, output = run_command(*command.split(), "--nothing", *(["MODEL"] if command == "serve" else []))
    assert exit_code == 2
    assert "--nothing" in output


@pytest.mark.parametrize("command", ["", *COMMANDS, "plan"])
def test_both_options_of_help_show_the_same(command: str, run_command: RunCommand) -> None:
    long, short = (run_command(*command.split(), option) for option in ("--help", "-h"))
    assert long == short
    assert long.exit_code == 0
    assert "Usage" in long.output
