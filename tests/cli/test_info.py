"""`fastattention info`, `--version` and the description of the machine."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

import fastattention
from fastattention import environment
from fastattention.attention.backend import ATTENTION_BACKENDS
from fastattention.cli import machine
from fastattention.cli.info import environment_variables

from .conftest import RunCommand


def test_info_names_versions_and_every_backend(run_command: RunCommand) -> None:
    exit_code, output = run_command("info")
    assert exit_code == 0
    for name in ATTENTION_BACKENDS.order:
        assert f" {name} " in output
    assert torch.__version__ in output
    assert fastattention.__version__ in output


def test_info_gives_the_reason_of_a_backend_that_cannot_run(
    run_command: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        ATTENTION_BACKENDS.get("sdpa"), "why_unavailable", lambda: "switched off [for a test]", raising=False
    )
    assert "sdpa unavailable switched off [for a test]" in run_command("info").output


def test_info_shows_every_environment_variable_with_its_value(
    run_command: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Path(environment.__file__).read_text()
    names = list(environment_variables())
    assert names
    assert all(source.count(f'os.environ.get("{name}")') == 1 for name in names)
    assert source.count('os.environ.get("FASTATTENTION_') == len(names)
    for name in names:
        monkeypatch.setenv(name, f"value of {name}"[:20])
    output = run_command("info").output
    assert all(name in output for name in names)
    assert output.count("value of") == len(names)


def test_version_is_printed(run_command: RunCommand) -> None:
    assert run_command("--version") == (0, f"fastattention {fastattention.__version__}")


def test_machine_is_described_in_json_types() -> None:
    described = machine.describe_machine()
    assert json.loads(json.dumps(described)) == described
    assert described["cpu"]
    assert described["memory_bytes"] > 2**27
    assert described["num_threads"] == fastattention.get_num_threads()
    assert described["command"]


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        ([str(machine.SOURCES / "benchmarks/ranks.py"), "--tp", "2"], "python benchmarks/ranks.py --tp 2"),
        ([str(machine.SOURCES / "benchmarks/pages")], "python benchmarks/pages"),
        (["/anywhere/bin/fastattention", "bench", "gpu"], "fastattention bench gpu"),
    ],
    ids=["script", "package", "installed command"],
)
def test_command_is_recorded_as_a_reader_would_type_it(
    arguments: list[str], command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith(machine.RECORDED_VARIABLES)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    monkeypatch.setattr("sys.argv", arguments)
    assert machine.command_line() == f"NCCL_P2P_DISABLE=1 {command}"


def test_driver_version_comes_from_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "NVIDIA_DRIVER", tmp_path / "version")
    assert machine.nvidia_driver() is None
    text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (bot)  Tue Sep 23\n"
    (tmp_path / "version").write_text(text + "GCC version:  gcc version 13.3.0\n")
    assert machine.nvidia_driver() == "580.95.05"


@pytest.mark.parametrize(
    ("text", "model", "flags"),
    [
        ("model name\t: Some CPU\nflags\t\t: sse avx2 fma\n\nmodel name\t: Other\n", "Some CPU", ["fma", "avx2"]),
        ("processor\t: 0\nFeatures\t: fp asimd sve\n", None, ["asimd", "sve"]),
        (
            "processor\t: 0\nFeatures\t: fp asimddp i8mm bf16\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n",
            "Neoverse-V1",
            ["asimddp", "bf16", "i8mm"],
        ),
        ("CPU implementer\t: 0x99\nCPU part\t: 0x123\n", "Arm core of implementer 0x99, part 0x123", []),
    ],
    ids=["x86", "arm without a name", "Neoverse", "another core"],
)
def test_processor_is_read_from_cpuinfo(
    text: str, model: str | None, flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(text)
    monkeypatch.setattr(machine, "CPUINFO", path)
    assert machine.cpu_flags() == flags
    if model is not None:
        assert machine.cpu_model() == model
