"""Checks README.md, CONTRIBUTING.md, CHANGELOG.md and docs/: sentences, table cells, links.

A sentence may have 35 words and a table cell 160 characters, both counted as a reader sees them: a link counts as its
text, a span of code as one word. A link to a file or a heading must have a target. Code blocks are not prose.
docs/decisions/archive holds raw tables and is left out. Prints file:line for each finding, and exits with 1 if any.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

MAX_WORDS = 35
MAX_CELL = 160
ROOT = Path(__file__).resolve().parents[1]
TOP_LEVEL = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
ARCHIVE = "docs/decisions/archive/"

FENCE = re.compile(r"\s*(```+|~~~+)")
LIST_ITEM = re.compile(r"\s*(?:[-*+]|\d+[.)])\s+")
CONTAINER = re.compile(r"\s*(?:!!!|\?\?\?\+?|===)\s")  # admonitions and tabs: indented text below them is prose
API_OBJECT = re.compile(r":::\s+(\S+)")  # documented from its docstring
BLOCK_STARTS = ("|", "#", ":::", "!!!", "???", "===")
HEADING = re.compile(r"(#{1,6})\s+(.*?)\s*#*$")
TABLE_RULE = re.compile(r"[\s|:-]+")
CODE_SPAN = re.compile(r"(`+)(.+?)\1(?!`)", re.DOTALL)
IMAGE = re.compile(r"!\[([^\]]*)\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)(?:\{[^}]*\})?")
LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\](?:\(<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\)|\[[^\]]*\])")
LINK_DEFINITION = re.compile(r"\s{0,3}\[([^\]]+)\]:\s+<?(\S+?)>?(?:\s+\".*\")?$")
SENTENCE_END = re.compile(r"[.!?][\"')\]*_]*(?=\s)")
HIDDEN = str.maketrans(" \n.!?", "\1\1\2\3\4")  # within a span of code
SHOWN = str.maketrans("\1\2\3\4", " .!?")
ABBREVIATIONS = ("e.g.", "i.e.", "etc.", "vs.", "cf.", "approx.", "resp.", "no.", "fig.", "dr.", "al.")


class Finding(NamedTuple):
    """A problem on a line of a file."""

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"


class Paragraph(NamedTuple):
    """Prose between two breaks. Lines are kept, so that a sentence can be located."""

    line: int
    text: str


class Page(NamedTuple):
    """The contents of a Markdown file, without code blocks."""

    paragraphs: list[Paragraph]
    rows: list[Paragraph]  # rows of tables
    anchors: frozenset[str]
    objects: tuple[str, ...]  # names of objects whose documentation is inserted


def read_page(text: str) -> Page:
    """Divides Markdown into prose, rows of tables, and targets of links."""
    paragraphs: list[Paragraph] = []
    rows: list[Paragraph] = []
    anchors, objects = [], []
    lines: list[str] = []
    in_container = False  # a list item, an admonition or a tab
    after_blank = True
    for number, line in enumerate([*_without_code(text), ""], start=1):
        stripped = line.strip()
        breaks = not stripped or bool(LIST_ITEM.match(line)) or stripped.startswith(BLOCK_STARTS)
        if breaks and lines:
            paragraphs.append(Paragraph(number - len(lines), "\n".join(lines)))
            lines = []
        if not stripped:
            after_blank = True
            continue
        if LIST_ITEM.match(line) or CONTAINER.match(line):
            in_container = True
        elif not line[0].isspace() and after_blank:
            in_container = False
        anchors += re.findall(r"(?:\bid|\bname)=\"([^\"]+)\"|\{#([\w.-]+)\s*\}", line)
        if heading := HEADING.match(line):
            anchors.append((slug(heading[2]), ""))
            paragraphs.append(Paragraph(number, visible(heading[2])))
        elif stripped.startswith("|"):
            if not TABLE_RULE.fullmatch(stripped):
                rows.append(Paragraph(number, stripped))
        elif api := API_OBJECT.match(line):
            objects.append(api[1])
        elif LINK_DEFINITION.match(line) or CONTAINER.match(line):
            pass
        elif line.startswith("    ") and after_blank and not in_container and not lines:
            continue  # a block of code, or options of an API object; after_blank stays as it is for the next line
        else:
            item = LIST_ITEM.match(line)
            lines.append(line[item.end() if item else 0 :].strip().removeprefix(">").strip())
        after_blank = bool(API_OBJECT.match(line))
    return Page(paragraphs, rows, frozenset(_numbered(first or second for first, second in anchors)), tuple(objects))


def _without_code(text: str) -> Iterator[str]:
    """Lines, with those of fenced code blocks, HTML comments and front matter empty."""
    text = re.sub(r"\A---\n.*?\n---\n", lambda match: "\n" * match[0].count("\n"), text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->", lambda match: "\n" * match[0].count("\n"), text, flags=re.DOTALL)
    fence = ""
    for line in text.splitlines():
        match = FENCE.match(line)
        if fence:
            yield ""
            if match and match[1].startswith(fence) and not line.strip().strip(fence[0]):
                fence = ""
        elif match:
            yield ""
            fence = match[1]
        else:
            yield line


def _numbered(slugs: Iterator[str]) -> Iterator[str]:
    """Slugs of headings; those that repeat get a number, as Python-Markdown and as GitHub write it."""
    seen: dict[str, int] = {}
    for each in slugs:
        count = seen.get(each, 0)
        seen[each] = count + 1
        yield from (f"{each}_{count}", f"{each}-{count}") if count else (each,)


def slug(heading: str) -> str:
    """The anchor of a heading."""
    plain = LINK.sub(r"\1", re.sub(r"\{[^}]*\}", "", heading)).replace("`", "").replace("*", "")
    ascii_only = unicodedata.normalize("NFKD", plain).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", ascii_only).strip().lower())


def visible(text: str) -> str:
    """Markdown as readers see it: the text of links, code unchanged. Keeps its lines."""
    text = IMAGE.sub("", text)
    return LINK.sub(r"\1", re.sub(r"\*\*|<[^>\n]+>", "", text))


def sentences(paragraph: Paragraph) -> Iterator[Paragraph]:
    """Sentences, with the line each begins on. A span of code is a single word in them."""
    text = visible(CODE_SPAN.sub(_as_one_word, paragraph.text))
    start = 0
    for match in SENTENCE_END.finditer(text):
        word = text[: match.end()].split()[-1].lstrip("(\"'[*").lower()
        if word in ABBREVIATIONS:
            continue
        yield _located(paragraph, text, start, match.end())
        start = match.end()
    if text[start:].strip():
        yield _located(paragraph, text, start, len(text))


def _as_one_word(span: re.Match[str]) -> str:
    return span[0].translate(HIDDEN) + "\n" * span[0].count("\n")


def _located(paragraph: Paragraph, text: str, start: int, end: int) -> Paragraph:
    start += len(text[start:]) - len(text[start:].lstrip())
    return Paragraph(paragraph.line + text.count("\n", 0, start), " ".join(text[start:end].split()))


def cells(row: str) -> list[str]:
    """Cells of a row of a table, as readers see them."""
    masked = CODE_SPAN.sub(lambda match: match[0].replace("|", "\0"), row.replace("\\|", "\0"))
    return [visible(cell).replace("`", "").replace("\0", "|").strip() for cell in masked.strip().strip("|").split("|")]


def check_prose(file: str, page: Page) -> Iterator[Finding]:
    """Sentences and table cells that are too long."""
    for paragraph in page.paragraphs:
        for sentence in sentences(paragraph):
            count = sum(any(letter.isalnum() for letter in word) for word in sentence.text.split())
            if count > MAX_WORDS:
                begin = " ".join(sentence.text.split()[:8]).translate(SHOWN)
                text = f'sentence of {count} words, at most {MAX_WORDS} are allowed: "{begin} ..."'
                yield Finding(file, sentence.line, text)
    for row in page.rows:
        for cell in cells(row.text):
            if len(cell) > MAX_CELL:
                text = f'table cell of {len(cell)} characters, at most {MAX_CELL} are allowed: "{cell[:40]} ..."'
                yield Finding(file, row.line, text)


def check_links(root: Path, file: str, text: str) -> Iterator[Finding]:
    """Links and images whose file or anchor does not exist."""
    for number, line in enumerate(_without_code(text), start=1):
        line = CODE_SPAN.sub(lambda span: "" if "](" in span[0] else span[0], line)
        targets = [image[2] for image in IMAGE.finditer(line)]
        targets += [link[2] for link in LINK.finditer(IMAGE.sub("", line)) if link[2]]
        if definition := LINK_DEFINITION.match(line):
            targets.append(definition[2])
        for target in targets:
            if (reason := _why_broken(root, file, target)) is not None:
                yield Finding(file, number, f"link to {target}: {reason}")


def _why_broken(root: Path, file: str, target: str) -> str | None:
    if re.match(r"[a-z][a-z0-9+.-]*:", target):
        return None  # another site
    path, _, anchor = target.partition("#")
    if path.startswith("/"):
        return "must be relative to the file it stands in"
    linked = (root / file).parent / path if path else root / file
    if not linked.exists():
        return f"{path} does not exist; allowed are existing files, relative to {Path(file).parent.as_posix()}/"
    if not anchor or linked.suffix != ".md":
        return None
    page = _page_of(linked)
    if anchor in page.anchors or any(anchor == name or anchor.startswith(f"{name}.") for name in page.objects):
        return None
    return f"#{anchor} is no heading there; headings are {', '.join(sorted(page.anchors)) or 'none'}"


@lru_cache
def _page_of(path: Path) -> Page:
    return read_page(path.read_text(encoding="utf-8"))


def files(root: Path) -> list[str]:
    """The files that are checked, relative to root."""
    pages = (path.relative_to(root).as_posix() for path in sorted((root / "docs").rglob("*.md")))
    return [name for name in (*TOP_LEVEL, *pages) if (root / name).exists() and not name.startswith(ARCHIVE)]


def check(root: Path) -> list[Finding]:
    """All findings below root."""
    found: list[Finding] = []
    for file in files(root):
        text = (root / file).read_text(encoding="utf-8")
        found += check_prose(file, read_page(text))
        found += check_links(root, file, text)
    return sorted(found)


def main() -> int:
    """Prints the findings. Returns 1 if there are any."""
    found = check(ROOT)
    for finding in found:
        print(finding)
    if found:
        print(f"{len(found)} findings: shorten the sentences and cells, correct the links")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
