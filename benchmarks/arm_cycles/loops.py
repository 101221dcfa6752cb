"""Loops of machine code: those that a traced call ran, and those that a function has."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise

from .assembly import Instruction

Code = tuple[Instruction, ...]
_MAIN_SHARE = 0.5  # of a call's arithmetic, which its main loop has at least
_BRANCH = re.compile(r"(b|b\.\w+|cbn?z|tbn?z)")
_TARGET = re.compile(r"\b([0-9a-f]+) <")


def main_loop(trace: Sequence[Instruction]) -> Code:
    """The usual iteration of the innermost loop with most of the arithmetic of a trace; all of it where none has."""
    total = sum(one.is_arithmetic for one in trace)
    candidates = []
    for iterations in _iterations(trace).values():
        share = sum(one.is_arithmetic for body, times in iterations.items() for one in body * times)
        if share >= _MAIN_SHARE * total:
            candidates.append(max(iterations, key=lambda body: len(body) * iterations[body]))
    return min(candidates, key=len, default=tuple(trace))


def _iterations(trace: Sequence[Instruction]) -> dict[int, Counter[Code]]:
    """How often each loop, by its first address, ran each path from there back to there."""
    found: dict[int, Counter[Code]] = defaultdict(Counter)
    last: dict[int, int] = {}
    heads = {
        after.address
        for before, after in pairwise(trace)
        if after.address <= before.address and _BRANCH.fullmatch(before.mnemonic)
    }
    for index, one in enumerate(trace):
        if one.address not in heads:
            continue
        if trace[index - 1].address >= one.address and one.address in last:
            found[one.address][tuple(trace[last[one.address] : index])] += 1
        last[one.address] = index
    return found


def busiest_loop(code: Sequence[Instruction]) -> Code:
    """The loop without an inner one that has the most multiply-adds. Empty where there is none."""
    addresses = {one.address for one in code}
    spans = set()
    for one in code:
        found = _TARGET.search(one.operands) if _BRANCH.fullmatch(one.mnemonic) else None
        if found and int(found[1], 16) <= one.address and int(found[1], 16) in addresses:
            spans.add((int(found[1], 16), one.address))
    bodies = [
        tuple(one for one in code if first <= one.address <= last)
        for first, last in spans
        if not any((first, last) != (a, b) and first <= a and b <= last for a, b in spans)
    ]
    return max(bodies, key=lambda body: sum(one.products for one in body), default=())
