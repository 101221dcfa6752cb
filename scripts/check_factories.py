"""Checks that every tensor the package makes names its device and dtype, so that the user's defaults do not change it.

python scripts/check_factories.py            # the package
python scripts/check_factories.py FILE ...
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Functions of torch that use torch.get_default_device() or torch.get_default_dtype() where none is named.
FACTORIES = frozenset(
    "arange as_tensor asarray complex empty empty_permuted empty_strided eye full linspace logspace ones rand randint "
    "randn randperm range scalar_tensor tensor tril_indices triu_indices zeros".split()
)
INTEGERS = frozenset("arange randint randperm tril_indices triu_indices".split())  # int64, whatever the defaults


def findings(path: Path) -> Iterator[str]:
    """A line for each tensor of a file that lacks a device or a dtype."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        if not (isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"):
            continue
        given = {keyword.arg for keyword in node.keywords}
        if None in given:  # **options
            continue
        if node.func.attr in FACTORIES:
            needed = ("device",) if node.func.attr in INTEGERS else ("device", "dtype")
            missing = [name for name in needed if name not in given]
        elif node.func.attr == "Generator" and not node.args:
            missing = ["device"] if "device" not in given else []
        else:
            continue
        if missing:
            yield f"{path}:{node.lineno}: torch.{node.func.attr} names no {' and no '.join(missing)}"


def main(names: list[str]) -> int:
    """Prints findings; 1 when there are some."""
    paths = [Path(name) for name in names] or sorted((ROOT / "fastattention").rglob("*.py"))
    found = [line for path in paths for line in findings(path)]
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
