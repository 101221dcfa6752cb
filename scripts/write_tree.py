"""Writes docs/internals/tree.md: every source file with the first sentence of its docstring or opening comment.

    python scripts/write_tree.py           # write the page
    python scripts/write_tree.py --check   # exit with 1 if the page is stale

Reads the files without importing them, so it needs no packages.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from generated_page import write_or_check

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "internals" / "tree.md"
FOLDERS = ("fastattention", "benchmarks", "scripts")
HEADERS = {".hpp", ".cuh", ".h"}
SOURCES = {".py", ".cpp", *HEADERS}
LONG = 120  # characters; a longer sentence is cut at its colon
INTRODUCTION = """# Source tree

`python scripts/write_tree.py` generates this page from docstrings and opening comments.
[Architecture](architecture.md) explains how the parts work together.
"""


def render(root: Path) -> str:
    """The whole page."""
    folders = [root / name for name in FOLDERS]
    for name in FOLDERS:
        folders += sorted(path for path in (root / name).rglob("*") if path.is_dir())
    folders.sort(key=lambda path: (FOLDERS.index(path.relative_to(root).parts[0]), path))
    return "\n".join([INTRODUCTION, *(text for folder in folders if (text := _section(root, folder)))])


def _section(root: Path, folder: Path) -> str:
    files = sorted(path for path in folder.iterdir() if _is_source(path))
    rows = "".join(f"| `{names}` | {sentence} |\n" for names, sentence in _rows(files))
    if not rows:
        return ""
    package = folder / "__init__.py"
    summary = f"{first_sentence(package)}\n\n" if package.exists() else ""
    return f"## {folder.relative_to(root).as_posix()}\n\n{summary}| file | contents |\n|---|---|\n{rows}"


def _is_source(path: Path) -> bool:
    if not path.is_file() or path.name == "__init__.py":
        return False
    return path.suffix in SOURCES or (path.suffix == "" and path.read_bytes().startswith(b"#!"))


def _rows(files: list[Path]) -> Iterator[tuple[str, str]]:
    """Names and first sentences. A header and its implementation share a row."""
    headers = {path.stem for path in files if path.suffix in HEADERS}
    for path in files:
        if path.suffix == ".cpp" and path.stem in headers:
            continue
        with_implementation = path.suffix in HEADERS and path.with_suffix(".cpp") in files
        yield path.name + (f"`, `{path.stem}.cpp" if with_implementation else ""), first_sentence(path)


def first_sentence(path: Path) -> str:
    """The first sentence of a file's docstring or opening comment, as Markdown."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        opening = (ast.get_docstring(ast.parse(text)) or "").split("\n\n")[0]
    else:
        comment = re.match(r"(?:#!.*\n)?((?://|#) .*\n)+", text)
        opening = re.sub(r"^(#!.*|// |# )", "", comment[0], flags=re.MULTILINE) if comment else ""
    sentence = re.split(r"(?<=\S\.)(?<!e\.g\.)\s|(?<=\?)\s|:\n", opening.strip(), maxsplit=1)[0].strip()
    if len(sentence) > LONG:
        sentence = sentence.split(": ")[0]
    if not sentence:
        raise SystemExit(f"{path} has no docstring or opening comment; add one that says what it holds")
    return re.sub(r"(?<!`)([*<|])", r"\\\1", " ".join(sentence.split()).rstrip(":"))


def main(arguments: list[str]) -> int:
    """Writes the page, or with --check compares it. Returns 1 if it is stale."""
    return write_or_check(PAGE, render(ROOT), arguments, "python scripts/write_tree.py")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
