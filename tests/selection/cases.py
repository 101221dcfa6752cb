"""Calls of the selection, and the slots that they must give."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastattention.attention.selection.backend import SelectionBackend
from fastattention.attention.selection.operators import SELECTION, SelectionOptions
from fastattention.attention.selection.problem import SelectionInputs
from fastattention.testing.memory import nan_in_fresh_memory


@dataclass(frozen=True)
class Case:
    """Sequences with so many queries and keys each, whose indices are drawn at random."""

    queries: tuple[int, ...] = (3, 0, 1, 5)
    keys: tuple[int, ...] = (40, 7, 3, 9)
    layout: str = "rows"  # or "varlen", "pages"
    page: int = 4
    heads: int = 1
    topk: int = 11
    key_block: int = 1
    causal: bool = False
    used: bool = False  # the sequences have fewer keys than they have room for
    steps: tuple[int, int] = (1, 0)  # slots from a token, and from a head, to the next
    dtype: torch.dtype = torch.int32
    share: float = 0.8  # of indices that name a block

    @property
    def is_batch(self) -> bool:
        """Whether all sequences have as many queries, so that the call has no cu_seqlens_q."""
        return len(set(self.queries)) <= 1

    @property
    def lengths(self) -> tuple[int, ...]:
        """Keys that there are."""
        return tuple(-(-2 * size // 3) for size in self.keys) if self.used else self.keys

    @property
    def k_seqlen(self) -> int:
        """Tokens of a row of keys, or of a page."""
        if self.layout == "pages":
            return self.page
        return sum(self.keys) if self.layout == "varlen" else max(self.keys, default=0)

    def arguments(self, device: str = "cpu") -> tuple[SelectionInputs, SelectionOptions]:
        """The tensors and options of the call."""
        generator = torch.Generator().manual_seed(sum(self.keys) + self.topk)
        sets = [self._indices(q, k, generator) for q, k in zip(self.queries, self.lengths, strict=True)]
        indices = torch.cat([torch.zeros(0, self.heads, self.topk), *sets]).to(self.dtype)
        table = None
        if self.layout == "pages":
            columns = max((-(-size // self.page) for size in self.keys), default=0)
            table = torch.randperm(len(self.keys) * columns, generator=generator).int().view(len(self.keys), columns)
        uses = self.used or self.layout == "pages" or (self.layout == "rows" and len(set(self.keys)) > 1)
        given = SelectionInputs(
            indices,
            None if self.is_batch else offsets(self.queries),
            offsets(self.keys) if self.layout == "varlen" else None,
            torch.tensor(self.lengths, dtype=torch.int32) if uses else None,
            table,
        )
        k_rows = {"rows": len(self.keys), "varlen": 1, "pages": 0 if table is None else table.numel()}[self.layout]
        row_step = 0 if self.layout == "varlen" else self.k_seqlen + 3  # rows, or pages, with room for more tokens
        options = SelectionOptions(
            len(self.queries), k_rows, self.k_seqlen, self.key_block, self.causal, row_step, *self.steps
        )
        return SelectionInputs(*(None if x is None else x.to(device) for x in given)), options  # type: ignore[arg-type]

    def _indices(self, queries: int, keys: int, generator: torch.Generator) -> Tensor:
        shape = queries, self.heads, self.topk
        blocks = -(-keys // self.key_block)
        drawn = torch.randint(max(blocks, 1), shape, generator=generator)
        kept = (torch.rand(shape, generator=generator) < self.share) & (blocks > 0)
        return torch.where(kept, drawn, -1)


def offsets(sizes: tuple[int, ...]) -> Tensor:
    return torch.tensor((0, *sizes)).cumsum(0, dtype=torch.int32)


CASES = {
    "rows": Case(),
    "batch": Case(queries=(2, 2, 2), keys=(9, 9, 9)),
    "step": Case(queries=(1,) * 5, keys=(50, 1, 17, 8, 0), used=True),
    "causal": Case(causal=True),
    "causal-batch": Case(queries=(4, 4), keys=(2, 9), causal=True, used=True),
    "varlen": Case(layout="varlen", causal=True),
    "varlen-used": Case(layout="varlen", used=True),
    "pages": Case(layout="pages"),
    "pages-of-three": Case(layout="pages", page=3, causal=True, used=True, topk=70),
    "pages-of-one": Case(layout="pages", page=1, used=True, topk=300),
    "heads": Case(heads=3, steps=(3, 1)),
    "heads-first": Case(heads=2, steps=(1, 1000), layout="pages", causal=True),
    "blocks": Case(key_block=4, topk=5, causal=True),
    "blocks-of-heads": Case(key_block=3, topk=9, heads=2, steps=(2, 1), layout="pages", used=True),
    "many": Case(queries=(2,), keys=(9000,), topk=5000),
    "many-blocks": Case(queries=(1, 3), keys=(9000, 4000), topk=40, key_block=64, layout="varlen", causal=True),
    "all": Case(share=1.0, topk=256),
    "none": Case(share=0.0, topk=33),
    "no-keys": Case(queries=(2, 1), keys=(0, 0)),
    "no-pages": Case(queries=(2, 1), keys=(0, 0), layout="pages"),
    "no-indices": Case(topk=0),
    "no-query": Case(queries=(0, 0), keys=(3, 4)),
    "no-sequence": Case(queries=(), keys=()),
}
CASES |= {f"{name}-int64": Case(**(vars(CASES[name]) | {"dtype": torch.int64})) for name in ("rows", "blocks", "all")}


def wanted(given: SelectionInputs, options: SelectionOptions) -> list[list[int]]:
    """The slots of every set of indices."""
    found = []
    for query, of_heads in enumerate(given.indices.tolist()):
        if given.cu_seqlens_q is None:
            size = len(given.indices) // options.batch_size
            ends = [(index + 1) * size for index in range(options.batch_size)]
        else:
            ends = given.cu_seqlens_q[1:].tolist()
        sequence = next(index for index, end in enumerate(ends) if query < end)
        length = options.k_seqlen
        if given.cu_seqlens_k is not None:
            length = int(given.cu_seqlens_k[sequence + 1] - given.cu_seqlens_k[sequence])
        if given.seqused_k is not None:
            length = int(given.seqused_k[sequence])
        seen = length - (ends[sequence] - 1 - query) if options.causal else length
        for head, blocks in enumerate(of_heads):
            firsts = [block * options.key_block for block in blocks if block >= 0]
            keys = [first + i for first in firsts for i in range(options.key_block) if first + i < seen]
            tokens = [token_of(given, options, sequence, key) for key in keys]
            found.append([token * options.token_step + head * options.head_step for token in tokens])
    return found


def token_of(given: SelectionInputs, options: SelectionOptions, sequence: int, key: int) -> int:
    if given.block_table is not None:
        page = int(given.block_table[sequence, key // options.k_seqlen])
        return page * options.row_step + key % options.k_seqlen
    first = sequence * options.row_step if given.cu_seqlens_k is None else int(given.cu_seqlens_k[sequence])
    return first + key


def slots_of(backend: SelectionBackend, *call: Any) -> list[list[int]]:
    """The slots that a backend finds. Behind them are zeros."""
    problem, inputs = SELECTION.prepare(*call)
    assert backend.why_not(problem) is None
    with nan_in_fresh_memory():
        slots, counts = backend.make_call(problem, inputs)(inputs)
    assert slots.shape == (problem.num_sets, problem.width)
    assert counts.shape == (problem.num_sets,)
    assert slots.dtype == counts.dtype == torch.int32
    rows = slots.tolist()
    for row, count in zip(rows, counts.tolist(), strict=True):
        assert not any(row[count:])
    return [row[:count] for row, count in zip(rows, counts.tolist(), strict=True)]


def check(backend: SelectionBackend, case: Case, device: str = "cpu") -> None:
    """Slots are right, and the next call gives the same."""
    expected = wanted(*case.arguments())
    assert slots_of(backend, *case.arguments(device)) == expected
    assert slots_of(backend, *case.arguments(device)) == expected
