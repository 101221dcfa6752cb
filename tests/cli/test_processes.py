"""The command as the shell runs it: bytes as arguments, other encodings, closed pipes, full disks, Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tiers import deep, slow

COMMAND = [sys.executable, "-m", "fastattention"]


def run(*arguments: str | bytes, **options: object) -> subprocess.CompletedProcess[str]:
    """`fastattention ARGUMENTS` in a process of its own."""
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, **options)  # type: ignore[call-overload,no-any-return]


def test_the_package_runs_as_a_module() -> None:
    done = run("-h")
    assert done.returncode == 0
    assert "Usage: fastattention [OPTIONS] COMMAND" in done.stdout


@deep
def test_bytes_that_are_no_text_are_refused_by_name(tmp_path: Path) -> None:
    done = run("generate", "--model", str(tmp_path), b"--prompt=\xff\xfe")
    assert done.returncode == 1
    assert done.stderr == "error: prompt='\\udcff\\udcfe' is not UTF-8\n"


@deep
def test_output_has_what_its_encoding_has_no_characters_for(tmp_path: Path) -> None:
    environment = dict(os.environ, PYTHONIOENCODING="ascii")
    picture = os.fsencode(tmp_path) + b"/\xff\xc3\xa9.svg"
    done = run(
        "plan", "allreduce", "--model=llama-2-7b", "--tp=2", "--seqlen=1024", b"--output=" + picture, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert "\\udcff\\xe9.svg" in done.stdout
    assert os.path.exists(picture)


@slow
def test_a_reader_that_goes_away_ends_the_command_quietly() -> None:
    reads, writes = os.pipe()
    os.close(reads)
    done = subprocess.run([*COMMAND, "plan", "ascend", "--seqlen=64"], stdout=writes, stderr=subprocess.PIPE, text=True)
    os.close(writes)
    assert done.returncode == 1
    assert done.stderr == ""


@slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_an_error(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        command = [*COMMAND, "plan", "ascend", "--seqlen=64"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode != 0
    assert "error: No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


@slow
def test_ctrl_c_ends_a_command_without_a_traceback(tmp_path: Path) -> None:
    command = [*COMMAND, "bench", "prefill", "--quick", "--seconds=60", f"--output={tmp_path}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()  # it has begun
        process.send_signal(signal.SIGINT)
        _, messages = process.communicate(timeout=120)
    assert process.returncode in (1, 130)  # by the release of typer
    assert "Traceback" not in messages
