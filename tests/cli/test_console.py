"""An error of the system ends a command with a message; our own bugs keep their traceback."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import typer

from fastattention.cli.console import check_output_file, errors_as_messages
from fastattention.errors import ArgumentError


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (lambda: torch.empty(1 << 60, dtype=torch.uint8), "there is not enough memory"),
        (lambda: bytearray(1 << 62), "there is not enough memory: use smaller values"),
        (lambda: Path("nowhere/file").read_bytes(), "nowhere/file: No such file or directory"),
    ],
    ids=["torch", "python", "file"],
)
def test_what_the_system_refuses_is_a_message(
    work: Callable[[], object], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as exit, errors_as_messages():
        work()
    assert exit.value.exit_code == 1
    assert f"error: {message}" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("error", [RuntimeError("a fault"), KeyError("x"), BrokenPipeError(), KeyboardInterrupt()])
def test_other_errors_are_left_alone(error: BaseException) -> None:
    with pytest.raises(type(error)), errors_as_messages():
        raise error


def test_a_file_that_can_be_written_is_as_it_was(tmp_path: Path) -> None:
    check_output_file(tmp_path / "new")
    assert not (tmp_path / "new").exists()
    (tmp_path / "old").write_text("text")
    check_output_file(tmp_path / "old")
    assert (tmp_path / "old").read_text() == "text"
    check_output_file(Path("/dev/null"))
    with pytest.raises(ArgumentError, match="is a folder; name a file"):
        check_output_file(tmp_path)
