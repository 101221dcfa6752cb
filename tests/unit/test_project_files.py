"""What the project's hosting and others read: YAML that parses, targets that exist, one version."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
YAML = [*ROOT.glob("*.yml"), *ROOT.glob("*.cff"), *ROOT.glob(".*.y*ml"), *ROOT.glob(".github/**/*.yml")]
FORMS = [path for path in YAML if path.parent.name == "ISSUE_TEMPLATE" and path.name != "config.yml"]
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


def test_citation_has_the_version_of_the_package() -> None:
    assert read(ROOT / "CITATION.cff")["version"] == version("fastattention")
