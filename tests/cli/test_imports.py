"""Importing the package is cheap, and the command line imports what a command needs when it runs."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = {"flash_attn", "matplotlib", "rich", "transformers", "typer"}


def imported_by(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    return set(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split())


@pytest.mark.parametrize(
    ("statement", "allowed"),
    [
        ("import fastattention, fastattention.integrations.flash_attn", set()),
        (
            "from fastattention.cli import main, info, generate, demo; "
            "import fastattention.cli.bench.command, fastattention.cli.check.command",
            {"rich", "typer"},
        ),
    ],
    ids=["package", "commands"],
)
def test_nothing_heavy_is_imported_before_it_is_needed(statement: str, allowed: set[str]) -> None:
    assert imported_by(statement) & HEAVY == allowed
