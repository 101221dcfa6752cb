"""What the indexer must return: cases, their tensors in memory that is NaN elsewhere, and a check of indices."""

from __future__ import annotations

import math
import zlib
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fastattention.indexer.problem import IndexerInputs, IndexerProblem
from fastattention.indexer.reference import scores_of_queries
from fastattention.testing.memory import guarded
from fastattention.testing.oracle import FACTOR, largest, largest_error

ROUNDINGS = 8  # of the largest score: by so much a score may always be off
UNUSED = 3  # tokens after the keys of a sequence, and pages of no sequence


@dataclass(frozen=True)
class IndexerCase:
    """One call: `batch_size` sequences of `seqlen_q` queries and `seqlen_k` keys, unless there are lists of lengths."""

    batch_size: int = 1
    seqlen_q: int = 5
    seqlen_k: int = 67
    seqlens_q: tuple[int, ...] | None = None  # of varlen queries
    seqlens_k: tuple[int, ...] | None = None
    nheads: int = 8
    headdim: int = 64
    topk: int = 16
    causal: bool = True
    keys: str = "rows"  # or "varlen" or "pages"
    used: bool = False  # whether seqused_k ends sequences early, in rows or varlen; pages have it anyway
    page_block_size: int = 16
    layout: str = "contiguous"  # or "heads": q is a view of (heads, tokens); or "gaps" or "odd-gaps" between all rows
    weight_dtype: torch.dtype = torch.float32
    ties: bool = False  # whether scores are small integers, which every dtype has exactly

    @cached_property
    def sampled_by(self) -> Mapping[str, Hashable]:
        """Axis -> value: what tests of this list are sampled by, in place of names. See tiers.py."""
        return {
            "queries": self.seqlens_q or (self.batch_size, self.seqlen_q),
            "keys": self.seqlens_k or self.seqlen_k,
            "tokens": (self.keys, self.used, self.page_block_size),
            "heads": self.nheads,
            "headdim": self.headdim,
            "topk": self.topk,
            "causal": self.causal,
            "memory": self.layout,
            "weights": str(self.weight_dtype),
        }

    @property
    def lengths_k(self) -> Sequence[int]:
        """Keys of each sequence."""
        sequences = self.batch_size if self.seqlens_q is None else len(self.seqlens_q)
        return (self.seqlen_k,) * sequences if self.seqlens_k is None else self.seqlens_k

    def arguments(self, dtype: torch.dtype, device: str = "cpu") -> dict[str, Any]:
        """Arguments of fast_indexer_func: random tensors, the same on every device."""
        generator = torch.Generator("cpu").manual_seed(zlib.crc32(repr(self).encode()))

        def draw(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            if self.ties:
                return torch.randint(-1, 2, shape, generator=generator, device="cpu").to(dtype)
            return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(dtype)

        tokens = (self.batch_size, self.seqlen_q) if self.seqlens_q is None else (sum(self.seqlens_q),)
        q, weights = draw(*tokens, self.nheads, self.headdim), draw(*tokens, self.nheads, dtype=self.weight_dtype)
        keys = [draw(length, self.headdim) for length in self.lengths_k]
        if self.layout == "heads":
            q = q.transpose(-2, -3).contiguous().transpose(-2, -3)
        tensors = {
            "q": self._placed(q),
            "weights": self._placed(weights),
            "cu_seqlens_q": None if self.seqlens_q is None else _offsets(self.seqlens_q),
            **self._place_keys(draw(0, self.headdim), keys, generator),
        }
        placed = {name: guarded(x.to(device)) for name, x in tensors.items() if x is not None}
        if self.layout in ("gaps", "odd-gaps"):
            placed.update({name: placed[name][..., : -self._gap] for name in ("q", "weights", "k")})
        return {**placed, "topk": self.topk, "causal": self.causal}

    @property
    def _gap(self) -> int:
        """Elements between two rows: as kernels take them, or not a multiple of any vector."""
        return {"gaps": 8, "odd-gaps": 3}.get(self.layout, 0)

    def _placed(self, x: Tensor) -> Tensor:
        """A tensor with a gap after each row."""
        return torch.cat([x, x.new_full((*x.shape[:-1], self._gap), math.nan)], dim=-1) if self._gap else x

    def _place_keys(self, none: Tensor, keys: Sequence[Tensor], generator: torch.Generator) -> dict[str, Tensor]:
        """k, and where it has the keys of each sequence. none: no keys, of the right dtype."""
        arguments = {"seqused_k": _int32(self.lengths_k)} if self.used or self.keys == "pages" else {}
        if self.keys == "pages":
            k, arguments["block_table"] = self._in_pages(none, keys, generator)
            return {"k": self._placed(k), **arguments}
        width = max(self.lengths_k, default=self.seqlen_k) if self.keys == "rows" else 0
        if self.used:
            keys, width = [_padded(x, max(width, len(x)) + UNUSED) for x in keys], width + UNUSED
        k = torch.cat([none, *keys])
        if self.keys == "varlen":
            arguments["cu_seqlens_k"] = _offsets(map(len, keys))
        else:
            k = k.view(len(keys), width, self.headdim)
        return {"k": self._placed(k), **arguments}

    def _in_pages(self, none: Tensor, keys: Sequence[Tensor], generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Pages in a random order, and their table. Tokens and pages that nobody uses are NaN, their entries wrong."""
        size, counts = self.page_block_size, [-(-len(x) // self.page_block_size) for x in keys]
        order = torch.randperm(sum(counts) + UNUSED, generator=generator, device="cpu")
        pages = none.new_full((len(order), size, self.headdim), math.nan)
        table = torch.full((len(keys), max(counts, default=0) + 1), -5, dtype=torch.int32, device="cpu")
        for i, x in enumerate(keys):
            mine = order[sum(counts[:i]) :][: counts[i]]
            table[i, : len(mine)] = mine
            pages[mine] = _padded(x, len(mine) * size).view(-1, size, self.headdim)
        return pages, table


def _padded(x: Tensor, length: int) -> Tensor:
    """Tokens with NaN after them."""
    return torch.cat([x, x.new_full((length - len(x), *x.shape[1:]), math.nan)])


def _int32(values: Iterable[int]) -> Tensor:
    return torch.tensor([*values], dtype=torch.int32, device="cpu")


def _offsets(lengths: Iterable[int]) -> Tensor:
    return _int32([0, *lengths]).cumsum(0, dtype=torch.int32)


def fault_of(problem: IndexerProblem, inputs: IndexerInputs, indices: Tensor) -> str | None:
    """What is wrong with the indices (total_q, topk) of a call whose scores are finite; None when nothing is.

    Keys may differ from the exact ones where scores hardly do: by twice the error of torch, beside some roundings.
    """
    if (indices.shape, indices.dtype) != (problem.out_shape, torch.int32):
        return f"indices are {indices.dtype} of shape {tuple(indices.shape)}"
    exact = dict(scores_of_queries(problem, inputs))
    usual = scores_of_queries(problem, inputs, torch.float32)
    error = max((largest_error(scores, exact[row]) for row, scores in usual), default=0.0)
    scale = max((largest(scores) for scores in exact.values()), default=0.0)
    allowed = FACTOR * error + ROUNDINGS * torch.finfo(torch.float32).eps * scale
    for row, scores in exact.items():
        count = min(problem.topk, len(scores))
        best, others = indices[row, :count].long(), indices[row, count:]
        if not bool((others == -1).all()):
            return f"query {row} sees {len(scores)} keys, and after {count} of them there is more than -1"
        if not bool(((best >= 0) & (best < len(scores))).all() and (best.diff() > 0).all()):
            return f"query {row} sees {len(scores)} keys; its {count} indices must rise from 0 on: {best.tolist()}"
        if count and (short := float(scores.topk(count).values[-1] - scores[best].min())) > allowed:
            return f"query {row} has a key whose score is too low by {short:.3g}; allowed are {allowed:.3g}"
    return None
