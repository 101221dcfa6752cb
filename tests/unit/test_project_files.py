"""Files of the project: YAML that parses, targets that exist, one version."""

from __future__ import annotations

import re
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mkdocs_links
import pytest
import yaml

ROOT = Path(__file__).parents[2]
YAML = [*ROOT.glob("*.yml"), *ROOT.glob("*.cff"), *ROOT.glob(".*.y*ml"), *ROOT.glob(".github/**/*.yml")]
FORMS = [path for path in YAML if path.parent.name == "ISSUE_TEMPLATE"]
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


@pytest.mark.parametrize("path", YAML, ids=lambda path: str(path.relative_to(ROOT)))
def test_yaml_parses(path: Path) -> None:
    assert isinstance(read(path), dict)


def test_workflows_run_nothing_but_make_targets() -> None:
    workflows = [read(path) for path in YAML if path.parent.name == "workflows"]
    steps = [step for workflow in workflows for job in workflow["jobs"].values() for step in job["steps"]]
    commands = [step["run"] for step in steps if "run" in step]
    assert set(commands) == {f"make {target}" for target in ("check", "test", "test-all", "wheels", "docs")}
    assert {command.removeprefix("make ") for command in commands} <= TARGETS


def test_issue_forms_ask_for_what_is_needed() -> None:
    for form in map(read, FORMS):
        assert {"name", "description", "body"} <= set(form)
        names = [element["id"] for element in form["body"] if element["type"] != "markdown"]
        assert len(names) == len(set(names)) > 0
    labels = [
        element["attributes"].get("label", "") for element in read(ROOT / ".github/ISSUE_TEMPLATE/hardware.yml")["body"]
    ]
    assert {"Output of `fastattention info`", "Output of `fastattention bench`"} <= set(labels)


def test_no_file_names_an_address_that_is_not_ours() -> None:
    """Only pyproject.toml has the project's address; the tested one belongs to others."""
    foreign = "github.com/" + "fastattention"
    found = subprocess.run(
        ["git", "grep", "-Iil", foreign, "--", ":/"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if found.returncode > 1:
        pytest.skip(f"no checkout: {found.stderr.strip()}")
    assert found.stdout == ""


LINKS = "[a page](../guides/cpu.md#speed), [`a file`](../../examples/train.py), ![a picture](../assets/speed.svg)"


@pytest.mark.parametrize(
    ("source", "file"),
    [(None, "`a file`"), ("https://host/project", "[`a file`](https://host/project/blob/HEAD/examples/train.py)")],
    ids=["unset", "set"],
)
def test_the_site_links_to_files_outside_it_only_by_an_address(source: str | None, file: str) -> None:
    project = "[project.urls]\n" + (f'Source = "{source}"\n' if source else '# Source = ""\n')
    assert mkdocs_links.source_url(project) == source
    shown = mkdocs_links.rewrite(LINKS, "guides/training.md", source)
    assert shown == LINKS.replace("[`a file`](../../examples/train.py)", file)


def test_citation_has_the_version_of_the_package() -> None:
    assert read(ROOT / "CITATION.cff")["version"] == version("fastattention")
