"""Every kind of call that the kernels serve, as launches, with the tilings of every chip, on tensors without memory.

The layouts, features and sizes are listed here. The backend chooses kernels, tilings and options.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastattention.attention.problem import Inputs, Problem
from fastattention.attention.validation import KvCacheArguments, Options, prepare_dense, prepare_kvcache, prepare_varlen
from fastattention.backends.ascend.call import Launch, prepare
from fastattention.backends.ascend.chips import CHIPS, Chip
from fastattention.backends.ascend.tiling import Tiling, choose_tiling

BATCH = 2
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
USUAL = (128, 128)
HEADDIMS = ((16, 16), (32, 32), (64, 64), USUAL, (256, 256), (192, 128), (64, 256))  # padded: 16 to 256


class Size(NamedTuple):
    """How large a call is."""

    seqlen_q: int
    seqlen_k: int
    nheads: int
    nheads_k: int


PREFILLS = (Size(40, 40, 8, 8), Size(1024, 1024, 32, 8), Size(32768, 32768, 16, 1))
DECODES = (Size(1, 300, 8, 8), Size(1, 4096, 32, 8), Size(1, 65536, 64, 1), Size(4, 4096, 32, 8))


@dataclass(frozen=True)
class Feature:
    """What changes scores or weights."""

    options: dict[str, Any] = field(default_factory=dict)
    alibi: tuple[int, ...] | None = None  # leading axes of the slopes
    sinks: bool = False

    def tensors(self, nheads: int) -> dict[str, Tensor | None]:
        return {
            "alibi_slopes": None if self.alibi is None else _numbers(*self.alibi, nheads),
            "sinks": _numbers(nheads) if self.sinks else None,
        }


PLAIN, CAUSAL = Feature(), Feature({"causal": True})
FEATURES = (
    PLAIN,
    CAUSAL,
    Feature({"window_left": 100, "window_right": 7}),
    Feature({"causal": True, "softcap": 30.0}),
    Feature(alibi=()),
    Feature({"causal": True}, alibi=(BATCH,)),
    Feature({"causal": True}, sinks=True),
    Feature({"causal": True, "window_left": 100, "softcap": 30.0}, alibi=(), sinks=True),
)


@dataclass(frozen=True)
class Layout:
    """The layout of keys, and the tensors that define it."""

    kind: str  # dense, varlen or cache
    page_block_size: int | None = None
    leftpad: bool = False
    batch_idx: bool = False
    int8: bool = False


DENSE, VARLEN, CACHE = Layout("dense"), Layout("varlen"), Layout("cache")
COMMON = (DENSE, VARLEN, CACHE, Layout("varlen", 128), Layout("cache", 128))
# With the usual head dimension: every feature without pages, and every other layout.
WITH_USUAL = (
    *itertools.product((DENSE, VARLEN, CACHE), FEATURES),
    *(
        (Layout(kind, size), feature)
        for kind in ("varlen", "cache")
        for size in (16, 100)
        for feature in (PLAIN, CAUSAL)
    ),
    (Layout("varlen", 128), FEATURES[-1]),
    (Layout("cache", 128), FEATURES[-1]),
    (Layout("cache", leftpad=True), CAUSAL),
    (Layout("cache", 128, leftpad=True), CAUSAL),
    (Layout("cache", batch_idx=True), CAUSAL),
    (Layout("cache", int8=True), PLAIN),
    (Layout("cache", 128, int8=True), CAUSAL),
    (Layout("cache", 100, int8=True), FEATURES[-1]),
)


class Shipped(NamedTuple):
    """A launch, and the call and chip that it is made for."""

    launch: Launch
    problem: Problem
    chip: Chip
    tiling: Tiling


@functools.cache
def shipped() -> tuple[Shipped, ...]:
    """Launches of every call of the matrix on every chip."""
    return tuple(itertools.chain.from_iterable(_shipped_for(*call) for call in calls()))


def _shipped_for(problem: Problem, inputs: Inputs) -> Iterator[Shipped]:
    for chip in CHIPS.values():
        tiling = choose_tiling(problem, chip)
        for launch in prepare(problem, inputs, tiling, chip).launches:
            yield Shipped(launch, problem, chip, tiling)


def calls() -> Iterator[tuple[Problem, Inputs]]:
    """All calls, validated."""
    for dtype, headdims in itertools.product(DTYPES, HEADDIMS):
        # bfloat16 has the tilings of float16.
        usual = WITH_USUAL if headdims == USUAL and dtype is not torch.bfloat16 else ()
        for layout, feature in (*itertools.product(COMMON, (CAUSAL,)), *usual):
            for size in DECODES if layout.kind == "cache" else PREFILLS:
                yield _call(dtype, headdims, layout, size, feature)


def _call(
    dtype: torch.dtype, headdims: tuple[int, int], layout: Layout, size: Size, feature: Feature
) -> tuple[Problem, Inputs]:
    tokens_q = (BATCH * size.seqlen_q,) if layout.kind == "varlen" else (BATCH, size.seqlen_q)
    page = layout.page_block_size
    if page is None:
        tokens_k = (BATCH * size.seqlen_k,) if layout.kind == "varlen" else (BATCH, size.seqlen_k)
    else:
        tokens_k = (BATCH * -(-size.seqlen_k // page), page)
    q = _numbers(*tokens_q, size.nheads, headdims[0], dtype=dtype)
    stored = torch.int8 if layout.int8 else dtype
    k, v = (_numbers(*tokens_k, size.nheads_k, headdim, dtype=stored) for headdim in headdims)
    scale = _numbers(*tokens_k, size.nheads_k) if layout.int8 else None
    table = None if page is None else _integers(BATCH, -(-size.seqlen_k // page))
    options, tensors = Options(**feature.options, return_lse=True), feature.tensors(size.nheads)
    if layout.kind == "dense":
        return prepare_dense(q, k, v, options, **tensors)
    if layout.kind == "varlen":
        offsets = _integers(BATCH + 1)
        return prepare_varlen(
            q, k, v, offsets, offsets, size.seqlen_q, size.seqlen_k, options, block_table=table, **tensors
        )
    arguments = KvCacheArguments(
        q, k, v,
        cache_seqlens=_integers(BATCH),
        cache_batch_idx=_integers(BATCH) if layout.batch_idx else None,
        cache_leftpad=_integers(BATCH) if layout.leftpad else None,
        block_table=table,
        k_scale=scale,
        v_scale=scale,
        **tensors,
    )  # fmt: skip
    return prepare_kvcache(arguments, options)


def _integers(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int32, device="meta")


def _numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
