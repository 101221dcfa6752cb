"""scripts/write_tree.py: the page of the source tree follows the files."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "write_tree.py"


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("write_tree", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def root(tmp_path: Path, script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Path:
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
    monkeypatch.setattr(script, "ROOT", tmp_path)
    monkeypatch.setattr(script, "PAGE", tmp_path / "tree.md")
    return tmp_path


def test_page_shows_first_sentences(script: ModuleType, root: Path) -> None:
    page = script.render(root)
    assert "## fastattention/kernels\n" in page
    assert "| `a.hpp`, `a.cpp` | Adds q . k of two rows. |\n" in page
    assert "| `speed.py` | How fast? |\n" in page
    assert "| `check` | Lint, e.g. types. |\n" in page


def test_check_fails_when_the_page_is_stale(script: ModuleType, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--check"]) == 1
    assert script.main([]) == 0
    assert script.main(["--check"]) == 0
    (root / "benchmarks" / "speed.py").write_text('"""How slow?"""\n')
    assert script.main(["--check"]) == 1
    assert "tree.md is stale" in capsys.readouterr().out


def test_file_without_a_description_is_an_error(script: ModuleType, root: Path) -> None:
    (root / "benchmarks" / "bare.py").write_text("x = 1\n")
    with pytest.raises(SystemExit, match=r"bare\.py has no docstring"):
        script.render(root)
