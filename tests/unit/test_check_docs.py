"""scripts/check_docs.py finds long sentences and cells and dead links, and nothing else."""

from __future__ import annotations

from pathlib import Path

import check_docs
import pytest

LONG = " ".join(["word"] * 36)  # one word more than is allowed
ALLOWED = " ".join(["word"] * 35)
LONG_CELL = "c" * 161


def findings(root: Path, **pages: str) -> list[str]:
    """The findings in README.md and the pages of docs/."""
    (root / "docs").mkdir(exist_ok=True)
    for name, text in pages.items():
        path = root / "README.md" if name == "README" else root / "docs" / f"{name}.md"
        path.write_text(text, encoding="utf-8")
    return [str(finding) for finding in check_docs.check(root)]


TOO_LONG: dict[str, tuple[str, str]] = {
    "sentence": (f"# Title\n\nShort one.\nAnother one. {LONG}.\n", "4: sentence of 36 words, at most 35 are allowed"),
    "over lines": ("Short.\nIt begins\n" + LONG.replace(" ", "\n") + ".\n", "2: sentence of 38 words"),
    "cell": (
        f"| a | b |\n|---|---|\n| 1 | {LONG_CELL} |\n",
        "3: table cell of 161 characters, at most 160 are allowed",
    ),
}


@pytest.mark.parametrize(("text", "found"), TOO_LONG.values(), ids=TOO_LONG)
def test_what_is_too_long_is_found_with_the_line_where_it_begins(tmp_path: Path, text: str, found: str) -> None:
    (finding,) = findings(tmp_path, README=text)
    assert finding.startswith(f"README.md:{found}")


@pytest.mark.parametrize(
    "text",
    [
        f"- An item.\n- {LONG}.",
        f"1. {LONG}.",
        f"- An item\n\n    {LONG}.",
        f"> {LONG}.",
        f"## {LONG}",
        f'!!! note "Title"\n\n    {LONG}.',
        f"It ends, e.g. {LONG}.",
        f"**{LONG}.**",
        LONG.replace("word", "[word](https://example.com/a.b)", 1) + ".",
        LONG.replace("word", "`a b. c`", 1) + ".",
    ],
    ids="item numbered nested quote heading admonition abbreviation bold link code_span".split(),
)
def test_long_sentence_is_found_wherever_it_stands(tmp_path: Path, text: str) -> None:
    assert len(findings(tmp_path, page=f"{text}\n")) == 1


@pytest.mark.parametrize(
    "text",
    [
        f"{ALLOWED}. {ALLOWED}! {ALLOWED}? {ALLOWED}.",
        f"- {ALLOWED}\n- {ALLOWED}\n* {ALLOWED}",
        f"{ALLOWED}:\n\n- {ALLOWED}",
        f"```text\n{LONG}\n| {LONG_CELL} |\n```",
        f"- Item:\n\n    ```sh\n    {LONG}\n    ```",
        f"Code:\n\n    {LONG}\n    {LONG}\n",
        f"<!-- {LONG} -->",
        f"One span: `{LONG}`.",
        f"[{ALLOWED}](https://example.com/{'x' * 200}).",
        f"| [a](https://example.com/{LONG_CELL}) |\n|---|",
        "| " + " | ".join(["c" * 100] * 4) + " |",
        "| `a|b` | c \\| d |",
        f"`cpu` is one. `{ALLOWED}` is two. {ALLOWED}.",
        f"::: package.module\n    options:\n      {LONG}",
    ],
    ids="sentences items colon fence item_fence indented comment span link cell_link cells pipe code api".split(),
)
def test_what_is_short_enough_or_no_prose_is_left_alone(tmp_path: Path, text: str) -> None:
    assert findings(tmp_path, page=f"{text}\n") == []


DEAD = ["[a](missing.md)", "![a](missing.png)", "[a](other.md#no-such-heading)", "[a](#no-such-heading)"]
DEAD += ["[a](/docs/other.md)", "[a](reference.md#package.other)", "[a][id]\n\n[id]: missing.md"]


@pytest.mark.parametrize("link", DEAD)
def test_link_that_leads_nowhere_is_found(tmp_path: Path, link: str) -> None:
    pages = {"other": "# Other\n", "reference": "::: package.function\n"}
    (found,) = findings(tmp_path, page=f"# Page\n\n{link}\n", **pages)
    assert found.startswith("docs/page.md:")
    assert "link to" in found


ALIVE = ["[a](other.md)", "[a](other.md#two-words-and-code)", "[a](other.md#twice_1)", "[a](other.md#by-hand)"]
ALIVE += ["[a](#page)", "[a](reference.md#package.function)", "[a](../README.md)"]
ALIVE += ["[a](https://example.com/missing.md#x)", "`[a](missing.md)`"]


@pytest.mark.parametrize("link", ALIVE)
def test_link_that_leads_somewhere_is_left_alone(tmp_path: Path, link: str) -> None:
    other = '# Other\n\n## Two words, and `code`\n\n## Twice\n\n## Twice\n\n<a id="by-hand"></a>\n'
    pages = {"other": other, "reference": "::: package.function\n", "README": "# Title\n"}
    assert findings(tmp_path, page=f"# Page\n\n{link}\n", **pages) == []


def test_archive_of_decisions_is_left_out(tmp_path: Path) -> None:
    archive = tmp_path / "docs" / "decisions" / "archive"
    archive.mkdir(parents=True)
    (archive / "tables.md").write_text(f"{LONG}.\n")
    (archive.parent / "index.md").write_text(f"{LONG}.\n")
    assert [each.split(":")[0] for each in findings(tmp_path)] == ["docs/decisions/index.md"]
