"""Importing the package is cheap, and the command line imports what a command needs when it runs."""

from __future__ import annotations

import subprocess
import sys

HEAVY = {"flash_attn", "matplotlib", "rich", "transformers", "typer"}
STATEMENTS = (
    "import fastattention, fastattention.integrations.flash_attn",
    "from fastattention.cli import main, info, generate, demo; "
    "import fastattention.cli.bench.command, fastattention.cli.check.command",
)


def test_nothing_heavy_is_imported_before_it_is_needed() -> None:
    look = "print(*{name.partition('.')[0] for name in sys.modules})"
    code = "\n".join(("import sys", *(line for statement in STATEMENTS for line in (statement, look))))
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    package, commands = (set(line.split()) & HEAVY for line in done.stdout.splitlines())
    assert package == set()
    assert commands == {"rich", "typer"}
