"""The table of what rules of scores cost."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .markdown import page, ratio, seconds, table
from .results import Result

GRADIENTS = " with gradients"
INTRODUCTION = """\
What a softcap, ALiBi, a bias, a window and dropout cost: one causal sequence of {seqlen} tokens, bfloat16, {hidden}
columns in all heads. "With gradients" is a forward and its backward. All calls take turns in one process. "/ plain"
compares with the same call without the rule, for windows with the window alone. FlexAttention is torch's, compiled; it
has no dropout. `backend="cuda"`: from Hopper on, plain calls go to cuDNN by themselves. **Bold** ratios are losses."""
LIMITS = """\
- **A softcap of heads of 64** takes three special functions for a score, a plain call one. They bound the call
  ([0073](../decisions/0073-compile-each-rule-of-scores-on-its-own.md)).
- **Dropout** is used in training, where a forward and its backward cost at most 1.3 times as much. A forward alone
  of heads of 64 and 128 is issued 31 and 36 instructions for a weight. Philox takes 3.5 of them
  ([0076](../decisions/0076-draw-16-bits-for-a-weight-of-dropout.md)).
- **FlexAttention** is compiled by Triton, which uses Hopper's own matrix instructions. Ours do not."""
DECODE = """\
{batch_size} sequences of {tokens} tokens, {nheads} on {nheads_k} heads of {headdim}: {plain} a plain call, {softcap}
with a softcap. Memory bounds both."""


def build() -> str:
    """score-rules.md."""
    result = Result.load("score_rules_gpu")
    data = result.data
    taken = {rule: seconds(time) for rule, time in data["decode"]["seconds"].items()}
    decode = DECODE.format(**data["decode"], **taken)
    return page(
        "Rules of scores",
        INTRODUCTION.format(seqlen=data["seqlen"], hidden=data["hidden"]),
        *result.sourced(f"## {result.gpu}", times(data["records"]), "### Decode", decode, "### Limits", LIMITS),
    )


def times(records: list[dict[str, Any]]) -> str:
    """By head dimension and rule, forward and with gradients."""
    headings = [
        "headdim, rule", "forward", "/ plain", "FlexAttention / ours", "with gradients", "/ plain",
        "FlexAttention / ours",
    ]  # fmt: skip
    return table(headings, [row for record in records for row in _rows(record)])


def _rows(record: dict[str, Any]) -> Iterable[list[str]]:
    taken: dict[str, float] = record["seconds"]
    rules = [name.removeprefix("ours ") for name in taken if name.startswith("ours ") and not name.endswith(GRADIENTS)]
    for rule in rules:
        cells = [f"{record['headdim']}, {rule}"]
        for suffix in ("", GRADIENTS):
            ours, flex = taken[f"ours {rule}{suffix}"], taken.get(f"flex {rule}{suffix}")
            # A window has less work than the plain call: its rules are compared with the window alone.
            plain = taken[f"ours {'window' if 'window' in rule else 'plain'}{suffix}"]
            cells += [seconds(ours), f"{ours / plain:.2f}", "-" if flex is None else ratio(flex / ours)]
        yield cells
