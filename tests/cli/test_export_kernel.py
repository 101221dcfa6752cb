"""`fastattention export-kernel`: which folders it writes to, and what it prints."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from fastattention.cli.export_kernel import KERNEL

from .conftest import RunCommand

FILES = {f"build/torch-{backend}/{name}" for backend in ("cpu", "cuda") for name in ("__init__.py", "metadata.json")}


def contents(folder: Path) -> dict[str, str]:
    """Contents of every file, by its name relative to `folder`."""
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", ["new", "new/folder", "empty", "."])
def test_a_new_or_an_empty_folder_is_filled(name: str, run_command: RunCommand, tmp_path: Path) -> None:
    if name == "empty":
        (tmp_path / name).mkdir()
    exit_code, output = run_command("export-kernel", name)
    assert exit_code == 0
    assert set(contents(tmp_path / name)) == FILES
    assert str(tmp_path / name) in output
    assert f'attn_implementation="{KERNEL}"' in output


def test_a_shell_takes_the_printed_line(run_command: RunCommand, tmp_path: Path) -> None:
    output = run_command("export-kernel", "it's $HOME [bold]").output
    line = output.partition("in the shell: ")[2].partition(" in Python: ")[0]
    taken = subprocess.run(
        ["sh", "-c", f'{line}\nprintf %s "$LOCAL_KERNELS"'], capture_output=True, text=True, check=True
    )
    assert taken.stdout == f"{KERNEL}={tmp_path}/it's $HOME [bold]"


def test_an_earlier_export_is_overwritten(run_command: RunCommand, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    run_command("export-kernel", folder)
    written = contents(folder)
    package = folder / "build" / "torch-cpu"
    (package / "__init__.py").write_text("from fastattention import nothing\n")  # by an older version
    (package / "metadata.json").unlink()
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "__init__.cpython-311.pyc").write_text("bytecode")
    assert run_command("export-kernel", folder).exit_code == 0
    assert {name: text for name, text in contents(folder).items() if "__pycache__" not in name} == written


@pytest.mark.parametrize(
    "name", ["README.md", "build/torch-xpu/metadata.json", "build/torch-cpu/_ops.py", "build/torch-cpu/__init__.py"]
)
def test_a_folder_with_other_files_stays_as_it_is(name: str, run_command: RunCommand, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / name).parent.mkdir(parents=True)
    (folder / name).write_text("not ours")
    exit_code, output = run_command("export-kernel", folder)
    assert exit_code == 1
    assert output == (
        f"error: folder='{folder}' holds '{name}', which export-kernel did not write; name an empty or a new folder"
    )
    assert contents(folder) == {name: "not ours"}


def test_a_link_in_the_folder_is_not_followed(run_command: RunCommand, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "build").symlink_to(tmp_path / "elsewhere")
    exit_code, output = run_command("export-kernel", "folder")
    assert exit_code == 1
    assert "holds 'build'" in output
    assert contents(tmp_path / "elsewhere") == {}


@pytest.mark.parametrize(
    ("name", "reason"),
    [("file", "Not a directory"), ("file/folder", "Not a directory"), ("/proc/folder", ""), ("x" * 300, "too long")],
    ids=["a file", "below a file", "proc", "too long"],
)
def test_no_folder_to_write_to(name: str, reason: str, run_command: RunCommand, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    exit_code, output = run_command("export-kernel", name)
    assert exit_code == 1
    assert output.startswith(f"error: folder='{name}' is no folder to write to: ")
    assert reason in output
    assert contents(tmp_path) == {"file": "text"}


def test_a_colon_would_divide_the_path(run_command: RunCommand, tmp_path: Path) -> None:
    exit_code, output = run_command("export-kernel", "a:b")
    assert exit_code == 1
    assert f"folder='{tmp_path}/a:b' must be without ':'" in output
    assert not list(tmp_path.iterdir())
