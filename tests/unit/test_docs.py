"""The documentation agrees with the code that it repeats."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import chain
from pathlib import Path

import tomli
import write_cli_reference
from packaging.requirements import Requirement
from tiers import slow

import fastattention
from fastattention.integrations.transformers.versions import OLDEST

ROOT = Path(__file__).parents[2]
INSTALLATION = (ROOT / "docs" / "get-started" / "installation.md").read_text()
ENVIRONMENT = (ROOT / "fastattention" / "environment.py").read_text()
RUNNABLE = ["README.md", "docs/index.md", "docs/get-started/first-calls.md"]
RUNNABLE += [f"docs/guides/{name}.md" for name in ("cpu", "caches", "block-masks", "linear-attention", "flash-attn")]
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
    assert {f"fastattention.linear.{name}" for name in exported("linear/__init__.py")} <= documented


@slow
def test_code_on_pages_runs() -> None:
    """The code runs in a process of its own: it takes memory, and one page puts flash_attn into sys.modules."""
    program = "".join(f"exec(compile({code_on(page)!r}, {page!r}, 'exec'), {{}})\n" for page in RUNNABLE)
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def code_on(page: str) -> str:
    """The Python code of a page. README.md gives its first block, because the others need a model."""
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    assert blocks
    return blocks[0] if page == "README.md" else "\n".join(blocks)


def exported(path: str) -> list[str]:
    """`__all__` of a module, which is not imported: torch.distributed may be missing."""
    text = (ROOT / "fastattention" / path).read_text()
    (names,) = re.findall(r"__all__ = \[(.*?)\]", text, re.DOTALL)
    return re.findall(r"\"(\w+)\"", names)
