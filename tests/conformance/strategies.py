"""The fields of case.py drawn at random: shapes, strides and features in every combination that is a valid call."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

from fastattention.testing.case import Bias, Blocks, DenseCase, KvCacheCase, Memory, VarlenCase

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])

HEADDIMS = st.one_of(st.sampled_from([16, 32, 64, 128]), st.integers(1, 80), st.integers(1, 256), st.integers(257, 512))
SEQLENS = st.one_of(st.integers(0, 20), st.integers(0, 160))
WINDOW_SIDES = st.one_of(st.just(-1), st.integers(0, 40))
PAGE_SIZES = st.one_of(st.none(), st.sampled_from([1, 2, 3, 7, 16, 64, 256]))

STRIDED: list[Memory] = ["contiguous", "heads_major", "sliced_heads", "every_second_token", "sliced_headdim"]
# Layouts of tensors that a call only reads, and whose last axis may be strided.
READ_ONLY: list[Memory] = [*STRIDED, "every_second_element", "one_head_expanded"]


@st.composite
def biases(draw: st.DrawFn, axes: str) -> Bias | None:
    """A bias with any of its axes broadcast, and any number of leading ones left out."""
    if draw(st.booleans()):
        return None
    kept = [letter if draw(st.booleans()) else "1" for letter in axes]
    kept = kept[draw(st.integers(0, len(kept) - 1)) :]
    matrix = len(kept) > 1
    return Bias(
        "".join(kept),
        hides=draw(
            st.sampled_from(["nothing", "entries", "columns", "rows"] if matrix else ["nothing", "entries", "columns"])
        ),
        dtype_of_q=draw(st.booleans()),
        strided=matrix and draw(st.booleans()),
    )


@st.composite
def block_masks(draw: st.DrawFn) -> Blocks | None:
    """A block mask in one call of four."""
    if draw(st.integers(0, 3)) != 3:
        return None
    size = st.sampled_from([64, 128, 192])
    density = draw(st.sampled_from([0.5, 0.1, 0.9]))
    axes = draw(st.sampled_from(["bh", "1h", "b1", "11"]))
    return Blocks(axes, (draw(size), draw(size)), density, strided=draw(st.booleans()))


@st.composite
def shared_words(draw: st.DrawFn, bias_axes: str) -> dict[str, Any]:
    """The fields that cases of all layouts have."""
    nheads_k = draw(st.integers(1, 3))
    headdim = draw(HEADDIMS)
    return {
        "name": "random",
        "nheads": nheads_k * draw(st.sampled_from([1, 2, 3, 4, 7, 8])),
        "nheads_k": nheads_k,
        "headdim": headdim,
        "headdim_v": draw(st.one_of(st.none(), HEADDIMS)),
        "magnitude": draw(st.sampled_from([1.0, 0.1, 4.0])),
        "softmax_scale": draw(st.one_of(st.none(), st.floats(-0.5, 0.5, width=16))),
        "causal": draw(st.booleans()),
        "window": (draw(WINDOW_SIDES), draw(WINDOW_SIDES)),
        "softcap": draw(st.sampled_from([0.0, 0.0, 2.5, 30.0])),
        "alibi": draw(st.sampled_from(["none", "per_head", "per_sequence"])),
        "sinks": draw(st.booleans()),
        "bias": draw(biases(bias_axes)),
    }


@st.composite
def dense_cases(draw: st.DrawFn) -> DenseCase:
    return DenseCase(
        **draw(shared_words("bhqk")),
        batch_size=draw(st.integers(0, 3)),
        blocks=draw(block_masks()),
        seqlen_q=draw(SEQLENS),
        seqlen_k=draw(SEQLENS),
        memory_q=draw(st.sampled_from([*READ_ONLY, "one_batch_expanded"])),
        memory_k=draw(st.sampled_from([*READ_ONLY, "one_batch_expanded"])),
    )


@st.composite
def varlen_cases(draw: st.DrawFn) -> VarlenCase:
    lengths = draw(st.lists(st.tuples(SEQLENS, SEQLENS), max_size=4))
    page_block_size = draw(PAGE_SIZES)
    return VarlenCase(
        **draw(shared_words("htk")),
        blocks=draw(block_masks()),
        seqlens_q=tuple(length_q for length_q, _ in lengths),
        seqlens_k=tuple(length_k for _, length_k in lengths),
        page_block_size=page_block_size,
        slack=draw(st.one_of(st.none(), st.integers(0, 20))),
        memory_q=draw(st.sampled_from(READ_ONLY)),
        memory_k=draw(st.sampled_from(STRIDED if page_block_size else READ_ONLY)),
    )


@st.composite
def kvcache_cases(draw: st.DrawFn) -> KvCacheCase:
    words = draw(shared_words("bhqk"))
    lengths = draw(st.lists(st.one_of(SEQLENS, st.integers(0, 700)), max_size=3))
    page_block_size = draw(PAGE_SIZES)
    seqlen_new = draw(st.one_of(st.just(0), st.integers(0, 9)))
    pairs = words["headdim"] // 2
    return KvCacheCase(
        **words,
        cache_seqlens=tuple(lengths),
        seqlen_q=draw(st.one_of(st.just(1), st.integers(0, 40))),
        spare=draw(st.integers(0, 40)),
        seqlen_new=seqlen_new,
        rotary_dim=2 * draw(st.integers(0, pairs)) if seqlen_new else 0,
        rotary_interleaved=draw(st.booleans()),
        batch_idx=page_block_size is None and draw(st.booleans()),
        leftpad=tuple(draw(st.integers(0, length)) for length in lengths) if draw(st.booleans()) else None,
        page_block_size=page_block_size,
        shared_pages=draw(st.integers(0, 2)),
        num_splits=draw(st.integers(0, 7)),
        stored=draw(st.sampled_from(["as_q", "as_q", "int8", "float8"])),
        memory_q=draw(st.sampled_from(READ_ONLY)),
        memory_k=draw(st.sampled_from(STRIDED)),
    )
