"""The documentation agrees with the code that it repeats."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest
import tomli
import write_cli_reference
from packaging.requirements import Requirement
from tiers import slow

import fastattention
from fastattention.integrations.transformers.versions import OLDEST
from unit import page_code
from unit.page_code import FENCE, GIVEN, PAGES, blocks_of

ROOT = Path(__file__).parents[2]
INSTALLATION = (ROOT / "docs" / "get-started" / "installation.md").read_text()
ENVIRONMENT = (ROOT / "fastattention" / "environment.py").read_text()
DOCUMENTED_EXTRAS = ("transformers", "plot", "cuda12")


def minimum(requirement: Requirement) -> str:
    (version,) = (each.version for each in requirement.specifier if each.operator == ">=")
    return version


def test_installation_names_the_minimum_versions_of_pyproject() -> None:
    documented = dict(re.findall(r"^\| ([\w-]+) \| ([\d.]+) \|", INSTALLATION, re.MULTILINE))
    project = tomli.loads((ROOT / "pyproject.toml").read_text())["project"]  # an installed package may be older
    extras = [project["optional-dependencies"][extra] for extra in DOCUMENTED_EXTRAS]
    for requirement in map(Requirement, chain(project["dependencies"], *extras)):
        assert documented[requirement.name] == minimum(requirement), requirement
    cmake = re.search(r"cmake_minimum_required\(VERSION ([\d.]+)", (ROOT / "CMakeLists.txt").read_text())
    assert documented["CMake"] == cmake[1]
    assert documented["transformers"] == OLDEST


def test_every_environment_variable_has_its_row_and_its_reader() -> None:
    page = (ROOT / "docs" / "reference" / "environment.md").read_text()
    documented = set(re.findall(r"^\| `(FASTATTENTION_\w+)`", page, re.MULTILINE))
    assert documented == set(re.findall(r"\"(FASTATTENTION_\w+)\"", ENVIRONMENT))


def test_command_line_page_is_what_the_script_writes() -> None:
    page = (ROOT / "docs" / "reference" / "cli.md").read_text()
    assert page == write_cli_reference.render(), "run python scripts/write_cli_reference.py"


def test_reference_documents_every_public_name() -> None:
    pages = "\n".join(path.read_text() for path in (ROOT / "docs" / "reference").glob("*.md"))
    documented = set(re.findall(r"^::: (\S+)$", pages, re.MULTILINE))
    assert {f"fastattention.{name}" for name in fastattention.__all__} <= documented
    assert {f"fastattention.distributed.{name}" for name in exported("distributed/__init__.py")} <= documented
    for package in ("linear", "convolution", "indexer"):
        assert {f"fastattention.{package}.{name}" for name in exported(f"{package}/__init__.py")} <= documented


@pytest.mark.parametrize("page", PAGES)
def test_code_on_pages_defines_the_names_that_it_uses(page: str) -> None:
    """It holds for blocks that are marked as not run, too."""
    known = set(GIVEN.get(page, ()))
    blocks = blocks_of(page)
    assert len(blocks) == len(FENCE.findall((ROOT / page).read_text())), "write ```python at the start of a line"
    unknown = {f"{page}:{block.line}": names for block in blocks if (names := block.unknown(known))}
    assert not unknown


@slow
def test_code_on_pages_runs() -> None:
    """The code runs in a process of its own: it takes memory, and one page puts flash_attn into sys.modules."""
    blocks = [block for page in PAGES for block in blocks_of(page)]
    ran = subprocess.run([sys.executable, page_code.__file__, *PAGES], capture_output=True, text=True, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr
    counted = int(ran.stdout.split()[-1])
    print(f"{counted} blocks ran; not run:")
    for block in blocks:
        if block.not_run:
            print(f"{block.page}:{block.line}: {block.not_run}")
    assert counted == sum(block.not_run is None for block in blocks)
    assert counted > 20


def test_blocks_names_and_marks_of_a_page_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_code, "ROOT", tmp_path)
    page = "Text.\n\n```python\nx = model(1)\n```\n\n<!-- not run: needs a moon -->\n\n```python\nprint(x, y)\n```\n"
    (tmp_path / "page.md").write_text(page)
    first, second = blocks_of("page.md")
    assert (first.line, first.not_run, second.line, second.not_run) == (4, None, 10, "needs a moon")
    known: set[str] = set()
    assert first.unknown(known) == {"model"}
    assert second.unknown(known) == {"y"}


def exported(path: str) -> list[str]:
    """`__all__` of a module, which is not imported: torch.distributed may be missing."""
    text = (ROOT / "fastattention" / path).read_text()
    (names,) = re.findall(r"__all__ = \[(.*?)\]", text, re.DOTALL)
    return re.findall(r"\"(\w+)\"", names)
