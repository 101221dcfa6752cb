"""Hook of mkdocs: rewrites links to files outside docs/, which are not on the site.

Pages link to them by relative paths, which work in the source tree. On the site such a link leads to the
project's address: `Source` under [project.urls] in pyproject.toml. While that is unset, the link becomes plain text.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
SOURCE = re.compile(r'^Source = "(.+)"$', re.MULTILINE)
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])+)\]\((\.\./[^)\s]+)\)")


def on_config(config: Any) -> None:
    """Shows the project's address in the footer of every page, if there is one.

    It is no `repo_url`: for an address at GitHub the theme's header asks api.github.com about the project.
    """
    if source := source_url(PROJECT.read_text(encoding="utf-8")):
        config.extra["social"] = [{"icon": "material/source-repository", "link": source, "name": "Source"}]


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """The page as the site has it."""
    return rewrite(markdown, page.file.src_uri, source_url(PROJECT.read_text(encoding="utf-8")))


def source_url(project: str) -> str | None:
    """The project's address in the text of pyproject.toml; None if it is unset."""
    match = SOURCE.search(project)
    return match[1] if match else None


def rewrite(markdown: str, page: str, source: str | None) -> str:
    """Links of `page`, a path below docs/, to files outside it lead to `source`, or are plain text without one."""

    def replace(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link[2]))
        if path.startswith("docs/"):
            return link[0]
        return f"[{link[1]}]({source}/blob/HEAD/{path})" if source else link[1]

    return LINK.sub(replace, markdown)
