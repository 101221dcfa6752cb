"""docs/decisions: the index lists every record, and code refers to records that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DECISIONS = ROOT / "docs" / "decisions"
ROW = re.compile(r"^\| (\d{4}) \| \[(.+)\]\((\1-\S+\.md)\) \|$", re.MULTILINE)
REFERENCE = re.compile(r"docs/decisions/[\w./-]*\.md")


def titles() -> dict[str, str]:
    """The title of every record, by its file."""
    records = sorted(DECISIONS.glob("[0-9]*.md"))
    return {record.name: record.read_text().splitlines()[0].removeprefix("# ") for record in records}


def test_index_lists_every_record_once_by_its_title() -> None:
    rows = ROW.findall((DECISIONS / "index.md").read_text())

    assert sorted((name, title) for _, title, name in rows) == list(titles().items())


def test_index_lists_records_of_an_area_in_order() -> None:
    for area in (DECISIONS / "index.md").read_text().split("\n## "):
        numbers = [number for number, _, _ in ROW.findall(area)]
        assert numbers == sorted(numbers), area.splitlines()[0]


def test_numbers_of_records_have_no_gaps() -> None:
    numbers = [int(name[:4]) for name in titles()]

    assert numbers == list(range(1, len(numbers) + 1))


def test_code_refers_to_records_that_exist() -> None:
    sources = [path for path in (ROOT / "fastattention").rglob("*") if path.suffix in {".py", ".hpp", ".cuh", ".cpp"}]
    references = {reference for path in sources for reference in REFERENCE.findall(path.read_text())}

    assert references, "no comment refers to a record: has the form of the reference changed?"
    assert {reference for reference in references if not (ROOT / reference).is_file()} == set()
