"""The vendor's operators without torch_npu: refusals, masks as their arguments, sequences of varlen calls."""

from __future__ import annotations

import itertools
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiers import slow

from fastattention.attention.problem import Layout, Problem
from fastattention.backends.ascend import vendor
from fastattention.backends.ascend.mask_tile import mask_tile
from fastattention.backends.ascend.vendor.masks import SparseMode, rows_without_keys, sparse_mask
from fastattention.backends.ascend.vendor.operators import INFERENCE, TRAINING, OperatorCall, check
from fastattention.backends.ascend.vendor.prefill import VarlenSequences
from unit.samples import problem_of, visible

DENSE = problem_of(device=torch.device("cpu"), batch_size=2, seqlen_q=100, seqlen_k=120, headdim=64, window_right=0)
VARLEN = replace(DENSE, layout=Layout.VARLEN)
CACHE = replace(DENSE, layout=Layout.KVCACHE, seqlen_q=5, total_q=10)
DECODE = replace(CACHE, seqlen_q=1, total_q=2)
PAGES = replace(CACHE, page_block_size=128)
DECODE_PAGES = replace(DECODE, page_block_size=16)


PREFILLS = (DENSE, VARLEN)
SERVED: list[tuple[tuple[Problem, ...], dict[str, Any]]] = [
    *(
        ((*PREFILLS, CACHE, DECODE, PAGES, DECODE_PAGES), fields)
        for fields in (
            {},
            {"dtype": torch.bfloat16},
            {"window_left": 7, "window_right": 3},
            {"softmax_scale": -0.5, "return_lse": True, "num_splits": 3, "deterministic": True},
            {"headdim": 128, "headdim_v": 128},
            {"nheads": 128, "nheads_k": 2},
        )
    ),
    ((CACHE,), {"seqlen_new": 5, "rotary_dim": 32}),  # which come first
    (PREFILLS, {"dtype": torch.float32}),  # these have two operators to choose from
    (PREFILLS, {"score_tensors": ("sinks",)}),
    (PREFILLS, {"headdim": 59, "headdim_v": 40}),
    (PREFILLS, {"headdim": 768, "headdim_v": 768}),
    (PREFILLS, {"nheads": 130, "nheads_k": 1}),
    (PREFILLS, {"seqlen_k": 2**20}),
]


@pytest.mark.parametrize(("problems", "fields"), SERVED, ids=[str(fields) for _, fields in SERVED])
def test_ordinary_calls_are_served(problems: tuple[Problem, ...], fields: dict[str, Any]) -> None:
    for problem in problems:
        assert vendor.why_not(replace(problem, **fields)) is None, problem


REFUSED: list[tuple[Problem, dict[str, Any], str]] = [
    *(
        (problem, fields, named)
        for problem in (DENSE, VARLEN, CACHE, DECODE)
        for fields, named in (
            ({"dropout_p": 0.1}, "dropout_p=0.1"),
            ({"softcap": 2.0}, "softcap=2.0"),
            ({"score_tensors": ("alibi_slopes",)}, "alibi_slopes"),
            ({"score_tensors": ("attn_bias",)}, "attn_bias"),
            ({"score_tensors": ("alibi_slopes",), "softcap": 3.0}, "alibi_slopes and softcap=3.0"),
            ({"nheads": 264}, "nheads=264; npu_f"),
            ({"headdim": 64, "headdim_v": 80}, "headdim_v=80 must"),
        )
    ),
    (CACHE, {"grads": ("q",)}, "no backward"),
    (DECODE, {"grads": ("q",)}, "no backward"),
    (DENSE, {"headdim": 800}, "headdim=800; npu_fusion_attention takes at most 768"),
    (DENSE, {"dtype": torch.float32, "seqlen_k": 2**20 + 1}, "seqlen_k=1048577"),
    (VARLEN, {"batch_size": 1025}, "batch_size=1025"),
    (VARLEN, {"total_q": 2**20 + 1}, "total_q=1048577"),
    (VARLEN, {"page_block_size": 128}, "block_table"),
    (CACHE, {"dtype": torch.float32}, "float32"),
    (CACHE, {"score_tensors": ("sinks",)}, "sinks"),
    (CACHE, {"headdim": 64, "headdim_v": 48}, "headdim_v=48 must equal headdim=64"),
    (CACHE, {"headdim": 40, "headdim_v": 40}, "headdim=40 must be a multiple of 16"),
    (DECODE, {"headdim": 528, "headdim_v": 528}, "headdim=528; npu_fused_infer_attention_score takes at most 512"),
    (CACHE, {"nheads": 65, "nheads_k": 1}, "nheads / nheads_k=65"),
    (CACHE, {"nheads": 256, "nheads_k": 8, "headdim": 256, "headdim_v": 256}, "nheads * headdim=65536"),
    (CACHE, {"batch_size": 65537}, "batch_size=65537"),
    (DECODE, {"seqlen_k": 262145}, "seqlen_k=262145; npu_fused_infer_attention_score takes at most 262144"),
    (PAGES, {"page_block_size": 64}, "page_block_size=64; npu_fused_infer_attention_score takes multiples of 128"),
    (PAGES, {"page_block_size": 640}, "up to 512 for seqlen_q=5"),
    (
        DECODE_PAGES,
        {"page_block_size": 24},
        "page_block_size=24; npu_fused_infer_attention_score takes multiples of 16",
    ),
    (DECODE_PAGES, {"page_block_size": 1024}, "up to 512 for seqlen_q=1"),
    (DECODE_PAGES, {"page_block_size": 1}, "nheads_k=2 with page_block_size=1; npu_sparse_flash_attention takes 1"),
]


@pytest.mark.parametrize(("problem", "fields", "named"), REFUSED, ids=[named for _, _, named in REFUSED])
def test_a_refusal_names_what_was_given_and_what_is_taken(problem: Problem, fields: dict[str, Any], named: str) -> None:
    assert vendor.why_not(problem) is None
    assert named in (vendor.why_not(replace(problem, **fields)) or "served")


def visible_to_the_vendor(seqlen_q: int, seqlen_k: int, left: int, right: int) -> list[list[bool]]:
    """The keys that the operators attend to, by their documentation."""
    mode, pre_tokens, next_tokens = sparse_mask(left, right, seqlen_q, seqlen_k)
    if mode is SparseMode.NO_MASK:
        return [[True] * seqlen_k for _ in range(seqlen_q)]
    if mode is SparseMode.CAUSAL:
        pre_tokens, next_tokens = 10**9, 0
    last_query, last_key = seqlen_q - 1, seqlen_k - 1  # these two meet in the bottom right corner
    return [
        [-pre_tokens <= (key - last_key) - (query - last_query) <= next_tokens for key in range(seqlen_k)]
        for query in range(seqlen_q)
    ]


def test_every_small_window_is_what_the_operator_attends_to() -> None:
    sides = (-1, 0, 1, 2, 5, 30)
    for seqlen_q, seqlen_k, left, right in itertools.product(range(1, 8), range(1, 8), sides, sides):
        asked = visible(seqlen_q, seqlen_k, left, right).tolist()
        assert visible_to_the_vendor(seqlen_q, seqlen_k, left, right) == asked, (seqlen_q, seqlen_k, left, right)
        empty = rows_without_keys(seqlen_q, seqlen_k, right)
        assert [any(row) for row in asked] == [False] * empty + [True] * (seqlen_q - empty)
        assert visible(seqlen_q - empty, seqlen_k, left, right).tolist() == asked[empty:], (
            "the rest is the same problem"
        )


@pytest.mark.parametrize(
    ("window", "mode"),
    [
        ((-1, -1), SparseMode.NO_MASK),
        ((-1, 0), SparseMode.CAUSAL),
        ((8, 0), SparseMode.BAND),
        ((9, 0), SparseMode.CAUSAL),  # as wide as the keys are long
        ((9, 6), SparseMode.NO_MASK),
        ((-1, 5), SparseMode.BAND),
        ((0, -1), SparseMode.BAND),
    ],
)
def test_the_cheapest_mode_is_taken(window: tuple[int, int], mode: SparseMode) -> None:
    assert sparse_mask(*window, seqlen_q=7, seqlen_k=10).mode is mode


def test_tokens_of_a_band_cannot_overflow() -> None:
    for window in ((5, -1), (-1, 5), (5, 2**31 - 1), (2**31 - 1, 5)):
        _, pre_tokens, next_tokens = sparse_mask(*window, seqlen_q=100, seqlen_k=2**20)
        assert max(pre_tokens, next_tokens) <= 2**20


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=6), st.sampled_from([-1, 0, 1, 4]))
def test_varlen_sequences_hold_the_queries_with_keys_and_no_others(lengths: list[tuple[int, int]], right: int) -> None:
    offsets_q, offsets_k = ([0, *itertools.accumulate(each[axis] for each in lengths)] for axis in (0, 1))
    sequences = VarlenSequences.of(offsets_q, offsets_k, right)
    wanted_q, wanted_k, wanted_lengths = [], [], []
    for first_q, first_k, (seqlen_q, seqlen_k) in zip(offsets_q, offsets_k, lengths, strict=False):
        seen = [first_q + i for i, row in enumerate(visible(seqlen_q, seqlen_k, -1, right)) if row.any()]
        if seen:
            wanted_q += seen
            wanted_k += range(first_k, first_k + seqlen_k)
            wanted_lengths.append((len(seen), seqlen_k))
    assert [token for span in sequences.spans_q for token in range(*span)] == wanted_q
    assert [token for span in sequences.spans_k for token in range(*span)] == wanted_k
    assert sequences.ends_q == list(itertools.accumulate(each[0] for each in wanted_lengths))
    assert sequences.ends_k == list(itertools.accumulate(each[1] for each in wanted_lengths))


def call(operator: str, **changed: Any) -> OperatorCall:
    k = torch.zeros(1, 3, 2, 16)
    heads = {"head_num": 4} if operator == TRAINING else {"num_heads": 4, "num_key_value_heads": 2}
    return OperatorCall(operator, {"query": torch.zeros(1, 3, 4, 16), "key": k, "value": k, **heads} | changed)


@pytest.mark.parametrize("operator", [TRAINING, INFERENCE])
def test_a_mode_without_the_mask_tile_is_never_called(operator: str) -> None:
    tile = mask_tile(torch.device("cpu"))
    check(call(operator))
    check(call(operator, sparse_mode=3, atten_mask=tile))
    for wrong in (None, tile[:5, :5], tile.to(torch.uint8), tile.T):
        with pytest.raises(ValueError, match="atten_mask"):
            check(call(operator, sparse_mode=3, atten_mask=wrong))
    with pytest.raises(ValueError, match="sparse_mode=2"):
        check(call(operator, sparse_mode=2, atten_mask=tile))


@pytest.mark.parametrize(
    ("operator", "name", "heads"), [(TRAINING, "head_num", 3), (INFERENCE, "num_key_value_heads", 3)]
)
def test_heads_that_do_not_divide_are_never_called(operator: str, name: str, heads: int) -> None:
    with pytest.raises(ValueError, match="query heads cannot share"):
        check(call(operator, **{name: heads}))


@slow
def test_without_torch_npu_the_reason_says_so() -> None:
    code = "from fastattention.backends.ascend import vendor; import sys, torch; print('torch_npu' in sys.modules); "
    code += "print(vendor.why_unavailable()); print(vendor.why_not_linear_all_reduce(9, 9, 9, torch.float16, 2))"
    command = [sys.executable, "-c", code]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    loaded, *reasons = printed.splitlines()
    assert loaded == "False"
    assert len(reasons) == 2
    assert all("torch_npu" in reason for reason in reasons)
