"""Calls with dropout: cases of the list again, which drop weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from fastattention.testing.case import Case

DROPOUT_P = 0.3
DROPPED = (
    "seqlens-129x127", "seqlens-1x1", "causal-300x128", "heads-6-of-2", "everything", "sinks", "varlen-sinks",
    "varlen-window-gqa", "varlen-pages-16", "few-queries-rows", "few-queries-scores", "blocks-scores",
)  # fmt: skip


def dropout_cases(cases: Iterable[Case]) -> list[Case]:
    """The cases named in DROPPED, with dropout and names of their own."""
    by_name = {case.name: case for case in cases}
    return [replace(by_name[name], name=f"dropout-{name}", dropout_p=DROPOUT_P) for name in DROPPED]
