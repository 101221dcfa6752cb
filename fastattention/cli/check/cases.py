"""The calls that `fastattention check` makes: one or two for each promise, in odd sizes, the plainest first."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32


@dataclass(frozen=True, kw_only=True)
class Case:
    """A call. Its tensors are drawn by calls.py from the case alone."""

    name: str
    layout: Literal["dense", "varlen", "cache"] = "dense"
    seqlens_q: tuple[int, ...] = (129, 129)  # one entry for each sequence; all equal unless varlen
    seqlens_k: tuple[int, ...] = (127, 127)  # for a cache: tokens before the call appends
    dtype: torch.dtype = HALF
    nheads: int = 4
    nheads_k: int = 4
    headdim: int = 64
    headdim_v: int | None = None  # None: headdim
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi: bool = False
    bias: bool = False
    sinks: bool = False
    blocks: bool = False  # with a block mask of 64 x 64 tokens
    dropout_p: float = 0.0
    lse: bool = False  # lse is returned and compared
    gradients: bool = False  # gradients of q, k, v and sinks are compared too
    page_block_size: int | None = None
    leftpad: tuple[int, ...] | None = None
    seqlen_new: int = 0
    rotary_dim: int = 0
    stored: torch.dtype | None = None  # dtype of quantized caches
    values_in_keys: bool = False  # v_cache is the first columns of k_cache
    # For a causal prompt too long for a full reference: (begin, end) of the rows that are compared. They see only keys
    # before `end`.
    spans: tuple[tuple[int, int], ...] = ()
    control: bool = False  # sdpa runs it too: where sdpa is wrong, the device or torch is


small = partial(Case, seqlens_q=(33, 33), seqlens_k=(77, 77))
ragged = partial(Case, layout="varlen", seqlens_q=(65, 1, 0, 130), seqlens_k=(65, 77, 5, 140))
decode = partial(Case, layout="cache", seqlens_q=(1, 1, 1), seqlens_k=(300, 1, 77))
append = partial(Case, layout="cache", seqlens_q=(5, 5, 5), seqlens_k=(300, 40, 77), seqlen_new=5, causal=True)

DENSE = [
    Case(name="dense", control=True),
    Case(name="dense", dtype=BRAIN, control=True),
    Case(name="dense", dtype=SINGLE, control=True),
    Case(name="dense, lse", lse=True),
    Case(name="causal, more keys than queries", seqlens_q=(65,), seqlens_k=(300,), causal=True),
    Case(name="causal, rows without keys", seqlens_q=(300,), seqlens_k=(128,), causal=True, dtype=BRAIN, lse=True),
    Case(name="causal", seqlens_q=(257,), seqlens_k=(257,), causal=True, dtype=SINGLE),
    Case(name="sliding window", seqlens_q=(200,), seqlens_k=(260,), causal=True, window=(64, 0)),
    Case(name="window to both sides", seqlens_q=(200,), seqlens_k=(260,), window=(30, 9), dtype=BRAIN),
    Case(name="GQA, 6 heads of 2", nheads=6, nheads_k=2, causal=True),
    Case(name="softcap", softcap=5.0),
    Case(name="ALiBi", alibi=True, causal=True, dtype=BRAIN),
    Case(name="sinks", sinks=True, causal=True, lse=True),
    Case(name="attention bias", bias=True),
    small(name="headdim 1", headdim=1),
    small(name="headdim 40", headdim=40),
    Case(name="headdim 128", headdim=128, dtype=BRAIN, causal=True),
    small(name="headdim 128", headdim=128, dtype=SINGLE),
    small(name="headdim 256", headdim=256),
    Case(name="headdim 192, values 128", headdim=192, headdim_v=128, dtype=BRAIN, causal=True),
    small(name="headdim 576, values 512", headdim=576, headdim_v=512, nheads_k=1, dtype=BRAIN),
    Case(name="one query", seqlens_q=(1, 1), seqlens_k=(611, 611), nheads=8, nheads_k=2),
    Case(name="block mask", seqlens_q=(200,), seqlens_k=(260,), blocks=True),
    Case(name="dropout", dropout_p=0.3),
    Case(name="long prompt", seqlens_q=(8192,), seqlens_k=(8192,), nheads=2, nheads_k=1, headdim=128, causal=True,
         spans=((0, 64), (4000, 4064), (8128, 8192))),
]  # fmt: skip

VARLEN = [
    ragged(name="varlen", control=True),
    ragged(name="varlen, causal, GQA", causal=True, nheads_k=2, dtype=BRAIN, lse=True),
    ragged(name="varlen, window", window=(40, 0), dtype=SINGLE),
    ragged(name="varlen, sinks, softcap", sinks=True, softcap=5.0, causal=True),
    ragged(name="varlen in pages of 16", page_block_size=16, causal=True),
]

CACHES = [
    decode(name="cache", nheads_k=2, control=True),
    decode(name="cache", nheads_k=2, dtype=BRAIN, headdim=128, lse=True),
    decode(name="cache", dtype=SINGLE),
    Case(name="cache, a row without keys", layout="cache", seqlens_q=(1, 1), seqlens_k=(0, 90), lse=True),
    decode(name="cache in pages of 16", nheads_k=2, page_block_size=16),
    decode(name="cache in pages of 128", nheads_k=2, page_block_size=128, dtype=BRAIN, headdim=128),
    Case(name="cache, long", layout="cache", seqlens_q=(1,), seqlens_k=(5003,), nheads=8, nheads_k=2, headdim=128),
    decode(name="cache, window, sinks", window=(50, 0), sinks=True),
    decode(name="cache, softcap, ALiBi", softcap=5.0, alibi=True, dtype=BRAIN),
    decode(name="cache, left padding", leftpad=(11, 0, 30), nheads_k=2),
    append(name="five queries over a cache", seqlen_new=0, nheads_k=2),
    append(name="append with rotary", rotary_dim=32, nheads_k=2, dtype=BRAIN),
    append(name="append with rotary in pages of 16", rotary_dim=64, page_block_size=16),
    decode(name="cache, headdim 576, values 512 in keys", nheads_k=1, headdim=576, headdim_v=512,
         values_in_keys=True, dtype=BRAIN),
    decode(name="int8 cache", nheads_k=2, stored=torch.int8),
    decode(name="int8 cache in pages of 32", nheads_k=2, headdim=128, page_block_size=32, stored=torch.int8,
         dtype=BRAIN),
    append(name="append to an int8 cache", stored=torch.int8),
    decode(name="float8 cache", nheads_k=2, stored=torch.float8_e4m3fn),
]  # fmt: skip

GRADIENTS = [
    Case(name="gradients", causal=True, gradients=True),
    Case(name="gradients, GQA, headdim 128", nheads_k=2, headdim=128, causal=True, gradients=True, dtype=BRAIN),
    Case(name="gradients", gradients=True, dtype=SINGLE),
    ragged(name="gradients, varlen", causal=True, gradients=True),
    Case(name="gradients, sinks, window", window=(40, 0), sinks=True, gradients=True),
    Case(name="gradients, dropout", dropout_p=0.3, gradients=True, dtype=BRAIN),
]

CASES = [*DENSE, *VARLEN, *CACHES, *GRADIENTS]


def cases_of(device: str) -> list[Case]:
    """The list for a device. float8 does not exist on the NPUs that the ascend backend knows."""
    return [case for case in CASES if device != "npu" or case.stored is not torch.float8_e4m3fn]
