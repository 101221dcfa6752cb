"""scripts/write_tree.py: the page of the source tree follows the files."""

from __future__ import annotations

from pathlib import Path

import pytest
import write_tree


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree of a few files, and the script at work on it."""
    files = {
        "fastattention/__init__.py": '"""The package. More."""\n',
        "fastattention/kernels/a.hpp": "// Adds q . k of\n// two rows. More.\n#pragma once\n",
        "fastattention/kernels/a.cpp": '#include "a.hpp"\n',
        "benchmarks/speed.py": '"""How fast? Measured.\n\nMore.\n"""\n',
        "scripts/check": "#!/bin/sh\n# Lint, e.g. types.\nset -eu\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(write_tree, "ROOT", tmp_path)
    monkeypatch.setattr(write_tree, "PAGE", tmp_path / "tree.md")
    return tmp_path


def test_page_shows_first_sentences(root: Path) -> None:
    page = write_tree.render(root)
    assert "## fastattention/kernels\n" in page
    assert "| `a.hpp`, `a.cpp` | Adds q . k of two rows. |\n" in page
    assert "| `speed.py` | How fast? |\n" in page
    assert "| `check` | Lint, e.g. types. |\n" in page


def test_check_fails_when_the_page_is_stale(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert write_tree.main(["--check"]) == 1
    assert write_tree.main([]) == 0
    assert write_tree.main(["--check"]) == 0
    (root / "benchmarks" / "speed.py").write_text('"""How slow?"""\n')
    assert write_tree.main(["--check"]) == 1
    assert "tree.md is stale" in capsys.readouterr().out


def test_file_without_a_description_is_an_error(root: Path) -> None:
    (root / "benchmarks" / "bare.py").write_text("x = 1\n")
    with pytest.raises(SystemExit, match=r"bare\.py has no docstring"):
        write_tree.render(root)
