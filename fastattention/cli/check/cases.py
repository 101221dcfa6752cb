"""The calls that `fastattention check` makes: one or two for each promise, in odd sizes, the plainest first."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from fastattention.testing.case import Bias, Blocks, Case, DenseCase, KvCacheCase, VarlenCase

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Check:
    """A case in one dtype, and which of its results are compared beside out and the caches."""

    case: Case
    dtype: torch.dtype = HALF
    lse: bool = False
    gradients: bool = False  # those of q, k, v and sinks
    control: bool = False  # sdpa, which is torch, runs it too: where that is wrong, the device or torch is


dense = partial(DenseCase, seqlen_q=129, seqlen_k=127, nheads=4, nheads_k=4, headdim=64)
small = partial(dense, seqlen_q=33, seqlen_k=77)
wide = partial(dense, seqlen_q=200, seqlen_k=260, batch_size=1)
varlen = partial(VarlenCase, seqlens_q=(65, 1, 0, 130), seqlens_k=(65, 77, 5, 140), nheads=4, nheads_k=4, headdim=64)
cache = partial(KvCacheCase, cache_seqlens=(300, 1, 77), nheads=4, nheads_k=4, headdim=64)
queries = partial(cache, seqlen_q=5, cache_seqlens=(300, 40, 77), causal=True)
append = partial(queries, seqlen_new=5)

DENSE = [
    Check(dense(name="dense"), control=True),
    Check(dense(name="dense"), BRAIN, control=True),
    Check(dense(name="dense"), SINGLE, control=True),
    Check(dense(name="dense, lse"), lse=True),
    Check(dense(name="causal, more keys than queries", seqlen_q=65, seqlen_k=300, batch_size=1, causal=True)),
    Check(dense(name="causal, rows without keys", seqlen_q=300, seqlen_k=128, batch_size=1, causal=True), BRAIN,
          lse=True),
    Check(dense(name="causal", seqlen_q=257, seqlen_k=257, batch_size=1, causal=True), SINGLE),
    Check(wide(name="sliding window", causal=True, window=(64, 0))),
    Check(wide(name="window to both sides", window=(30, 9)), BRAIN),
    Check(dense(name="GQA, 6 heads of 2", nheads=6, nheads_k=2, causal=True)),
    Check(dense(name="softcap", softcap=5.0)),
    Check(dense(name="ALiBi", alibi="per_head", causal=True), BRAIN),
    Check(dense(name="sinks", sinks=True, causal=True), lse=True),
    Check(dense(name="attention bias", bias=Bias("hqk"))),
    Check(small(name="headdim 1", headdim=1)),
    Check(small(name="headdim 40", headdim=40)),
    Check(dense(name="headdim 128", headdim=128, causal=True), BRAIN),
    Check(small(name="headdim 128", headdim=128), SINGLE),
    Check(small(name="headdim 256", headdim=256)),
    Check(dense(name="headdim 192, values 128", headdim=192, headdim_v=128, causal=True), BRAIN),
    Check(small(name="headdim 576, values 512", headdim=576, headdim_v=512, nheads_k=1), BRAIN),
    Check(dense(name="one query", seqlen_q=1, seqlen_k=611, nheads=8, nheads_k=2)),
    Check(wide(name="block mask", blocks=Blocks("1h"))),
    Check(dense(name="dropout", dropout_p=0.3)),
    Check(dense(name="long prompt", seqlen_q=4099, seqlen_k=4099, batch_size=1, nheads=2, nheads_k=1, headdim=128,
                causal=True)),
]  # fmt: skip

VARLEN = [
    Check(varlen(name="varlen"), control=True),
    Check(varlen(name="varlen, causal, GQA", causal=True, nheads_k=2), BRAIN, lse=True),
    Check(varlen(name="varlen, window", window=(40, 0)), SINGLE),
    Check(varlen(name="varlen, sinks, softcap", sinks=True, softcap=5.0, causal=True)),
    Check(varlen(name="varlen in pages of 16", page_block_size=16, causal=True)),
]

CACHES = [
    Check(cache(name="cache", nheads_k=2), control=True),
    Check(cache(name="cache", nheads_k=2, headdim=128), BRAIN, lse=True),
    Check(cache(name="cache"), SINGLE),
    Check(cache(name="cache, a row without keys", cache_seqlens=(0, 90)), lse=True),
    Check(cache(name="cache in pages of 16", nheads_k=2, page_block_size=16)),
    Check(cache(name="cache in pages of 128", nheads_k=2, page_block_size=128, headdim=128), BRAIN),
    Check(cache(name="cache, long", cache_seqlens=(5003,), nheads=8, nheads_k=2, headdim=128)),
    Check(cache(name="cache, window, sinks", window=(50, 0), sinks=True)),
    Check(cache(name="cache, softcap, ALiBi", softcap=5.0, alibi="per_head"), BRAIN),
    Check(cache(name="cache, left padding", leftpad=(11, 0, 30), nheads_k=2)),
    Check(queries(name="five queries over a cache", nheads_k=2)),
    Check(append(name="append with rotary", rotary_dim=32, nheads_k=2), BRAIN),
    Check(append(name="append with rotary in pages of 16", rotary_dim=64, page_block_size=16)),
    Check(cache(name="cache, headdim 576, values 512 in keys", nheads_k=1, headdim=576, headdim_v=512,
                values_in_keys=True), BRAIN),
    Check(cache(name="int8 cache", nheads_k=2, stored="int8")),
    Check(cache(name="int8 cache in pages of 32", nheads_k=2, headdim=128, page_block_size=32, stored="int8"), BRAIN),
    Check(append(name="append to an int8 cache", stored="int8")),
    Check(cache(name="float8 cache", nheads_k=2, stored="float8")),
]  # fmt: skip

GRADIENTS = [
    Check(dense(name="gradients", causal=True), gradients=True),
    Check(dense(name="gradients, GQA, headdim 128", nheads_k=2, headdim=128, causal=True), BRAIN, gradients=True),
    Check(dense(name="gradients"), SINGLE, gradients=True),
    Check(varlen(name="gradients, varlen", causal=True), gradients=True),
    Check(dense(name="gradients, sinks, window", window=(40, 0), sinks=True), gradients=True),
    Check(dense(name="gradients, dropout", dropout_p=0.3), BRAIN, gradients=True),
]

CHECKS = [*DENSE, *VARLEN, *CACHES, *GRADIENTS]


def checks_of(device: str) -> list[Check]:
    """The list for a device. float8 does not exist on the NPUs that the ascend backend knows."""
    return [one for one in CHECKS if not (device == "npu" and getattr(one.case, "stored", None) == "float8")]
