"""Blocks of rows see the keys that their rows see in the whole call."""

from __future__ import annotations

from itertools import accumulate, combinations, pairwise
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiers import sampled
from torch import Tensor

from fastattention.attention.problem import Inputs, Problem
from fastattention.attention.reference import reference_attention
from fastattention.attention.validation import KvCacheArguments, Options, prepare_dense, prepare_kvcache
from fastattention.distributed.row_blocks import (
    AttentionOutProj,
    CoarseAttention,
    Piece,
    may_cut_sequences,
    piece_call,
    piece_inputs,
    pieces,
)

SIDES = st.integers(-1, 12)


@st.composite
def options(draw: st.DrawFn) -> Options:
    return Options(
        causal=draw(st.booleans()),
        window_left=draw(SIDES),
        window_right=draw(SIDES),
        softcap=draw(st.sampled_from([0.0, 3.0])),
        return_lse=True,
    )


def random(*shape: int) -> Tensor:
    return torch.randn(shape)


@st.composite
def calls(draw: st.DrawFn) -> tuple[Problem, Inputs]:
    """Calls of up to three sequences: longer or shorter than their keys, or a cache with padding, in rows or pages."""
    torch.manual_seed(draw(st.integers(0, 9)))
    b, sq, sk, chosen = draw(st.integers(1, 3)), draw(st.integers(1, 9)), draw(st.integers(0, 12)), draw(options())
    slopes, sinks = draw(st.sampled_from([None, random(4), random(b, 4)])), draw(st.sampled_from([None, random(4)]))
    if draw(st.booleans()):
        axes = [(draw(st.sampled_from([1, size])) if size else 0) for size in (b, 4, sq, sk)]
        bias = random(*axes) if draw(st.booleans()) else None
        q, k, v = random(b, sq, 4, 8), random(b, sk, 2, 8), random(b, sk, 2, 4)
        return prepare_dense(q, k, v, chosen, alibi_slopes=slopes, attn_bias=bias, sinks=sinks)
    lengths = torch.tensor(draw(st.lists(st.integers(0, 12), min_size=b, max_size=b)), dtype=torch.int32)
    k_cache, v_cache = random(4, 12, 2, 8), random(4, 12, 2, 4)
    table, rows = None, torch.randperm(4)[:b].int()
    if draw(st.booleans()):
        k_cache, v_cache = k_cache.view(16, 3, 2, 8), v_cache.view(16, 3, 2, 4)
        table, rows = torch.randperm(16)[: b * 4].int().view(b, 4), None
    arguments = KvCacheArguments(
        random(b, sq, 4, 8), k_cache, v_cache, cache_seqlens=lengths, block_table=table, cache_batch_idx=rows,
        cache_leftpad=lengths // 3 if draw(st.booleans()) else None, alibi_slopes=slopes,
        attn_bias=random(b, 1, sq, 12) if draw(st.booleans()) else None, sinks=sinks,
    )  # fmt: skip
    return prepare_kvcache(arguments, chosen)


def attention_of_rows(problem: Problem, inputs: Inputs, start: int, stop: int) -> Tensor:
    parts = []
    for piece in pieces(start, stop, problem.seqlen_q):
        smaller = piece_call(problem, piece, "auto")
        part = reference_attention(smaller.problem, piece_inputs(inputs, piece, smaller))
        parts.append(part.out.flatten(0, 1))
    return torch.cat(parts)


@given(call=calls(), data=st.data())
def test_a_block_is_those_rows_of_the_whole(call: tuple[Problem, Inputs], data: st.DataObject) -> None:
    problem, inputs = call
    step = 1 if may_cut_sequences(problem) else problem.seqlen_q
    units = problem.total_q // step
    start = data.draw(st.integers(0, units - 1))
    stop = data.draw(st.integers(start + 1, units))
    whole = reference_attention(problem, inputs)
    part = attention_of_rows(problem, inputs, start * step, stop * step)
    torch.testing.assert_close(part, whole.out.flatten(0, 1)[start * step : stop * step])


@sampled
@pytest.mark.parametrize("cached", [False, True], ids=["dense", "cache"])
@pytest.mark.parametrize("window", [(2, 0), (2, 3), (2, -1), (0, 1), (-1, 2)], ids=str)
def test_every_block_of_a_windowed_call_is_those_rows_of_the_whole(window: tuple[int, int], cached: bool) -> None:
    """Some sequences have more keys than queries and some fewer; the last one has hardly more than padding."""
    torch.manual_seed(0)
    options = Options(window_left=window[0], window_right=window[1], return_lse=True)
    q, k, v = random(2, 6, 4, 8), random(2, 9, 2, 8), random(2, 9, 2, 4)
    if cached:
        lengths, leftpad = torch.tensor([9, 4], dtype=torch.int32), torch.tensor([1, 3], dtype=torch.int32)
        call = KvCacheArguments(q, k, v, cache_seqlens=lengths, cache_leftpad=leftpad)
        problem, inputs = prepare_kvcache(call, options)
    else:
        problem, inputs = prepare_dense(q, k, v, options)
    whole = reference_attention(problem, inputs).out.flatten(0, 1)
    for start, stop in combinations(range(13), 2):
        torch.testing.assert_close(attention_of_rows(problem, inputs, start, stop), whole[start:stop])


def test_whole_sequences_are_one_piece() -> None:
    assert pieces(3, 29, 5) == (Piece(0, 1, 3, 5), Piece(1, 5, 0, 5), Piece(5, 6, 0, 4))


def test_a_causal_dense_block_is_views_of_the_keys_that_its_rows_see() -> None:
    bias = random(1, 1, 8, 1)
    problem, inputs = prepare_dense(*(random(2, 8, 2, 8) for _ in range(3)), Options(causal=True), attn_bias=bias)
    piece = Piece(1, 2, 2, 5)
    part = piece_inputs(inputs, piece, piece_call(problem, piece, "auto"))
    assert part.k.shape[1] == part.v.shape[1] == 5
    for name in ("q", "k", "v", "attn_bias"):
        assert getattr(part, name).untyped_storage().data_ptr() == getattr(inputs, name).untyped_storage().data_ptr()


def call_of_three_sequences(causal: bool) -> tuple[AttentionOutProj, Tensor]:
    """A call, and its result for all 21 rows."""
    torch.manual_seed(0)
    q, k, v = random(3, 7, 4, 8), random(3, 9, 2, 8), random(3, 9, 2, 4)
    problem, inputs = prepare_dense(q, k, v, Options(causal=causal))
    call, out = AttentionOutProj(problem, inputs, random(6, 16), "cpu"), torch.empty(21, 6)
    call.compute(0, 21, out)
    return call, out


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("blocks", "attended"),
    [((5, 5, 5, 6), (21,)), ((3, 4, 7, 7), (7, 14)), ((1, 1, 6, 2, 11), (8, 13)), ((2, 3, 5, 11), (2, 8, 11))],
)
def test_attention_of_several_blocks_at_once_is_that_of_each(
    blocks: tuple[int, ...], attended: tuple[int, ...], causal: bool
) -> None:
    """Blocks of a call of three sequences begin anywhere. Attention is computed once for rows that are joined."""
    call, expected = call_of_three_sequences(causal)
    out = torch.full_like(expected, torch.nan)
    with mock.patch.object(call, "attend", wraps=call.attend) as attend:
        compute = CoarseAttention(call, attended).compute
        for start, stop in pairwise([0, *accumulate(blocks)]):
            compute(start, stop, out[start:stop])
    torch.testing.assert_close(out, expected)
    asked = [piece for start, stop in pairwise([0, *accumulate(attended)]) for piece in pieces(start, stop, 7)]
    assert [each.args for each in attend.call_args_list] == [(piece,) for piece in asked]


def test_attention_at_once_serves_rows_in_any_order_and_products_add() -> None:
    call, expected = call_of_three_sequences(causal=True)
    out = torch.full_like(expected, torch.nan)
    with mock.patch.object(call, "attend", wraps=call.attend) as attend:
        compute = CoarseAttention(call, (10, 11)).compute
        for start, stop in ((3, 5), (14, 21), (9, 14), (5, 9), (0, 3)):
            compute(start, stop, out[start:stop])
        compute(2, 12, out[2:12], adds=True)
        compute(7, 7, out[7:7])
    assert attend.call_count == len([*pieces(0, 10, 7), *pieces(10, 21, 7)])
    twice = (torch.arange(21) >= 2) & (torch.arange(21) < 12)
    torch.testing.assert_close(out, torch.where(twice[:, None], 2 * expected, expected))
    call.compute(0, 21, out, adds=True)
    torch.testing.assert_close(out, torch.where(twice[:, None], 3 * expected, 2 * expected))
