"""The sum of all ranks is right for any blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from distributed.sums import HIDDEN, Sum, check, run_part
from distributed.team import Team
from fastattention.testing.case import Bias, DenseCase, KvCacheCase

SINGLE = torch.float32


def dense(
    name: str, partition: tuple[int, ...], dtype: torch.dtype = SINGLE, with_bias: bool = False, **case: Any
) -> Sum:
    return Sum(DenseCase(name=name, **case), partition, dtype, with_bias)


def cached(name: str, partition: tuple[int, ...] = (5, 15, 7), **case: Any) -> Sum:
    case = {"cache_seqlens": (40, 17, 29), "seqlen_q": 9, "causal": True} | case
    return Sum(KvCacheCase(name=f"cache-{name}", **case), partition)


# Blocks that end within sequences, at their ends, and go over several.
DENSE = [
    dense("plain", (5, 23, 23), batch_size=3, seqlen_q=17, seqlen_k=29),
    dense("with-bias", (5, 23, 23), with_bias=True, batch_size=3, seqlen_q=17, seqlen_k=29),
    dense("one-block-with-bias", (51,), with_bias=True, batch_size=3, seqlen_q=17, seqlen_k=29),
    dense("a-block-a-row", (1,) * 8, batch_size=2, seqlen_q=4, seqlen_k=4, causal=True),
    dense("causal-gqa", (7, 13, 46), batch_size=2, seqlen_q=33, seqlen_k=33, nheads=6, nheads_k=2, causal=True),
    dense("whole-sequences", (9, 27, 9), batch_size=5, seqlen_q=9, seqlen_k=9, causal=True),
    dense("causal-more-keys", (3, 15, 4), batch_size=2, seqlen_q=11, seqlen_k=40, causal=True),
    dense("rows-without-keys-and-sinks", (20, 20), batch_size=1, seqlen_q=40, seqlen_k=11, causal=True, sinks=True),
    dense("no-keys", (3, 5), batch_size=1, seqlen_q=8, seqlen_k=0),
    dense("window", (11, 19, 52), batch_size=2, seqlen_q=41, seqlen_k=41, window=(6, 3)),
    dense("window-left-only", (11, 19, 52), batch_size=2, seqlen_q=41, seqlen_k=50, window=(6, -1)),
    dense("window-right-only", (11, 19, 52), batch_size=2, seqlen_q=41, seqlen_k=30, window=(-1, 4)),
    dense("causal-window", (11, 19, 52), batch_size=2, seqlen_q=41, seqlen_k=60, causal=True, window=(5, -1)),
    dense("alibi-causal", (8, 20, 14), batch_size=2, seqlen_q=21, seqlen_k=30, causal=True, alibi="per_head"),
    dense("alibi-per-sequence", (9, 18, 9), batch_size=4, seqlen_q=9, seqlen_k=12, alibi="per_sequence"),
    dense("sinks-softcap", (8, 34), batch_size=2, seqlen_q=21, seqlen_k=21, causal=True, sinks=True, softcap=4.0),
    dense("softmax-scale", (8, 34), batch_size=2, seqlen_q=21, seqlen_k=21, softmax_scale=-0.3),
    dense("values-wider", (8, 34), batch_size=2, seqlen_q=21, seqlen_k=21, headdim=24, headdim_v=56, causal=True),
    dense("bias-full", (8, 20, 14), batch_size=2, seqlen_q=21, seqlen_k=21, causal=True, bias=Bias("bhqk", "rows")),
    dense("bias-a-row-of-keys", (8, 20, 14), batch_size=2, seqlen_q=21, seqlen_k=30, bias=Bias("b11k", "columns")),
    dense("bias-a-column", (8, 20, 14), batch_size=2, seqlen_q=21, seqlen_k=30, causal=True, bias=Bias("q1")),
    dense("strided", (8, 34), batch_size=2, seqlen_q=21, seqlen_k=30, memory_q="sliced_heads", memory_k="heads_major"),
    dense("last-axis-strided", (8, 34), batch_size=2, seqlen_q=21, seqlen_k=30, memory_q="every_second_element"),
    dense("bfloat16", (7, 13, 46), batch_size=2, seqlen_q=33, seqlen_k=33, causal=True, dtype=torch.bfloat16),
    dense("float16", (7, 13, 46), batch_size=2, seqlen_q=33, seqlen_k=33, causal=True, dtype=torch.float16),
]

CACHED = [
    cached("plain", causal=False),
    cached("causal"),
    cached("causal-first-chunk", (5, 9, 4), cache_seqlens=(9, 17)),
    cached("causal-shorter-than-q", cache_seqlens=(0, 5, 30), sinks=True),
    cached("window", (7, 13, 10), cache_seqlens=(40, 17), seqlen_q=15, causal=False, window=(6, 4)),
    cached("window-shorter-than-q", (4, 16, 10), cache_seqlens=(3, 17), seqlen_q=15, causal=False, window=(6, 2)),
    cached("paged", page_block_size=16, shared_pages=1),
    cached("batch-idx", batch_idx=True),
    cached("leftpad", (2, 18, 7), cache_seqlens=(40, 17, 12), leftpad=(5, 9, 11)),
    cached("one-length", (5, 13), cache_seqlens=(20, 20), lengths="int"),
    cached("full", (5, 13), cache_seqlens=(20, 20), lengths="full", spare=0),
    cached("int8", stored="int8"),
    cached("int8-paged", (5, 13), cache_seqlens=(40, 17), stored="int8", page_block_size=16),
    cached("alibi-bias-gqa", alibi="per_sequence", bias=Bias("bhqk"), nheads=4, headdim_v=48),
]


@pytest.mark.parametrize("one", [*DENSE, *CACHED], ids=lambda one: one.case.name)
def test_the_sum_of_all_ranks_is_right(team: Team, one: Sum) -> None:
    check(one, team.run(run_part, one))


def run_into(one: Sum) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Writes to a tensor of the caller, within memory that must not change."""
    memory = torch.full((one.rows * HIDDEN + 20,), 7.0)
    given = memory[10:-10].view(one.case.batch_size, one.case.seqlen_q, HIDDEN)
    out = run_part(one, out=given)
    return out, torch.cat((memory[:10], memory[-10:])), out is given


def test_a_given_out_is_filled_and_nothing_beside_it(team: Team) -> None:
    one = dense("given-out", (5, 23, 23), with_bias=True, batch_size=3, seqlen_q=17, seqlen_k=29)
    results = team.run(run_into, one)
    check(one, [out for out, _, _ in results])
    for _, around, is_given in results:
        assert is_given
        assert (around == 7.0).all()
