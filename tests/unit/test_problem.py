"""Problem: its properties, and how arguments become one."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy
import pytest
import torch
from torch.autograd import forward_ad

from fastattention import fast_attn_func
from fastattention.attention.problem import Layout, Problem
from fastattention.attention.validation import KvCacheArguments, Options, prepare_dense, prepare_kvcache, prepare_varlen
from fastattention.attention.validation.common import read_options
from unit.samples import int32


def dense(options: Options = Options()) -> Problem:  # noqa: B008 (immutable)
    q, k, v = torch.zeros(2, 5, 6, 16), torch.zeros(2, 7, 2, 16), torch.zeros(2, 7, 2, 24)
    return prepare_dense(q, k, v, options)[0]


def test_dense_problem_says_everything_about_the_call() -> None:
    problem = dense(Options(softmax_scale=0.5, causal=True, softcap=3.0, deterministic=True, return_lse=True))
    assert problem == Problem(
        layout=Layout.DENSE, device=torch.device("cpu"), dtype=torch.float32, batch_size=2, seqlen_q=5, seqlen_k=7,
        total_q=10, nheads=6, nheads_k=2, headdim=16, headdim_v=24, softmax_scale=0.5, window_left=-1, window_right=0,
        softcap=3.0, deterministic=True, return_lse=True,
    )  # fmt: skip
    assert problem.group_size == 3
    assert problem.out_shape == (2, 5, 6, 24)
    assert problem.lse_shape == (2, 6, 5)
    assert not problem.is_paged


def test_varlen_problem_takes_the_longest_lengths() -> None:
    q, k, v = torch.zeros(5, 6, 16), torch.zeros(7, 2, 16), torch.zeros(7, 2, 24)
    problem, inputs = prepare_varlen(q, k, v, int32(0, 2, 5), int32(0, 7, 7), None, 9, Options())
    assert problem.layout is Layout.VARLEN
    assert (problem.batch_size, problem.seqlen_q, problem.seqlen_k, problem.total_q) == (2, 3, 9, 5)
    assert problem.out_shape == (5, 6, 24)
    assert problem.lse_shape == (6, 5)
    assert inputs.cu_seqlens_k.tolist() == [0, 7, 7]


def test_kvcache_problem_counts_the_capacity_and_the_new_tokens() -> None:
    arguments = KvCacheArguments(
        torch.zeros(2, 3, 6, 16), torch.zeros(4, 8, 2, 16), torch.zeros(4, 8, 2, 24),
        torch.zeros(2, 1, 2, 16), torch.zeros(2, 1, 2, 24), torch.zeros(32, 4), torch.zeros(32, 4),
        cache_seqlens=int32(3, 20), block_table=int32([0, 1, 1], [2, 3, 3]),
    )  # fmt: skip
    problem, inputs = prepare_kvcache(arguments, Options(rotary_interleaved=False, num_splits=2))
    assert problem.layout is Layout.KVCACHE
    assert (problem.seqlen_q, problem.seqlen_k, problem.seqlen_new, problem.total_q) == (3, 24, 1, 6)
    assert (problem.rotary_dim, problem.rotary_interleaved, problem.num_splits) == (8, False, 2)
    assert problem.is_paged
    assert problem.page_block_size == 8
    assert problem.out_shape == (2, 3, 6, 24)
    assert problem.lse_shape == (2, 6, 3)
    assert problem.cache_dtype is None
    assert inputs.k is arguments.k_cache
    assert inputs.v is arguments.v_cache


def test_quantized_caches_are_named_and_come_with_their_scales() -> None:
    stored, scales = torch.zeros(4, 8, 2, 16, dtype=torch.int8), torch.ones(4, 2, 8).transpose(1, 2)
    arguments = KvCacheArguments(
        torch.zeros(4, 3, 6, 16).bfloat16(), stored, stored.clone(), k_scale=scales, v_scale=scales.clone()
    )
    problem, inputs = prepare_kvcache(arguments, Options())
    assert (problem.dtype, problem.cache_dtype) == (torch.bfloat16, torch.int8)
    assert inputs.k is arguments.k_cache
    assert inputs.k_scale is arguments.k_scale
    assert inputs.v_scale is arguments.v_scale
    plain = arguments._replace(k_cache=stored.bfloat16(), v_cache=stored.bfloat16(), k_scale=None, v_scale=None)
    assert prepare_kvcache(plain, Options())[0].cache_dtype is None


@pytest.mark.parametrize(
    ("causal", "window", "is_causal", "has_window"),
    [
        (False, (-1, -1), False, False),
        (True, (-1, -1), True, True),
        (False, (-1, 0), True, True),
        (True, (3, -1), False, True),
        (False, (0, 0), False, True),
        (False, (-1, 2), False, True),
    ],
)
def test_causal_is_the_window_without_a_left_end(
    causal: bool, window: tuple[int, int], is_causal: bool, has_window: bool
) -> None:
    problem = dense(Options(causal=causal, window_left=window[0], window_right=window[1]))
    assert (problem.is_causal, problem.has_window) == (is_causal, has_window)


def test_problems_of_equal_calls_are_equal_and_hash_alike() -> None:
    problem = dense(Options(causal=True))
    assert problem == dense(Options(causal=True))
    assert hash(problem) == hash(dense(Options(causal=True)))
    assert problem != dense(Options(causal=False))
    with pytest.raises(dataclasses.FrozenInstanceError):
        problem.nheads = 1  # type: ignore[misc]


@pytest.mark.parametrize("needs_grad", [False, True])
def test_gradients_are_wanted_only_where_autograd_records(needs_grad: bool) -> None:
    q = torch.zeros(1, 2, 2, 8, requires_grad=True)
    with torch.set_grad_enabled(needs_grad):
        problem, _ = prepare_dense(q, q.detach(), q.detach(), Options())
    assert problem.needs_grad == needs_grad


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own warnings
def test_forward_mode_wants_gradients_too() -> None:
    q = torch.zeros(1, 2, 2, 8)
    with forward_ad.dual_level(), torch.no_grad():
        assert not prepare_dense(q, q, q, Options())[0].needs_grad
        assert prepare_dense(q, q, forward_ad.make_dual(q, q), Options())[0].needs_grad


@pytest.mark.parametrize("index", range(4), ids=["v", "alibi_slopes", "attn_bias", "sinks"])
def test_every_float_tensor_can_want_gradients(index: int) -> None:
    q = torch.zeros(1, 2, 2, 8)
    v, slopes, bias, sinks = (
        x.requires_grad_(place == index)
        for place, x in enumerate((torch.zeros(1, 2, 2, 8), torch.zeros(2), torch.zeros(2, 2), torch.zeros(2)))
    )
    problem, _ = prepare_dense(q, q, v, Options(), alibi_slopes=slopes, attn_bias=bias, sinks=sinks)
    assert problem.needs_grad
    assert problem.score_tensors == ("alibi_slopes", "attn_bias", "sinks")


def test_default_scale_is_the_inverse_root_of_headdim() -> None:
    assert dense().softmax_scale == 0.25
    assert dense(Options(softmax_scale=0.0)).softmax_scale == 0.0


PAIRS: dict[str, Any] = {
    "tuple": (2, 1),
    "list": [2, 1],
    "int64_tensor": torch.tensor([2, 1]),
    "int32_tensor": int32(2, 1),
    "array": numpy.array([2, 1]),
    "range": range(2, 0, -1),
}


@pytest.mark.parametrize("window_size", PAIRS.values(), ids=PAIRS)
def test_window_size_is_read_from_any_pair(window_size: Any) -> None:
    options = read_options(None, False, window_size, 0.0)
    assert (options.window_left, options.window_right) == (2, 1)
    assert type(options.window_left) is type(options.window_right) is int


def test_causal_closes_the_right_side_of_a_window() -> None:
    problem = dense(read_options(None, True, (3, 4), 0.0))
    assert (problem.window_left, problem.window_right) == (3, 0)


@pytest.mark.parametrize("causal", [False, True])
def test_a_window_wider_than_the_keys_hides_nothing_and_fits_32_bits(causal: bool) -> None:
    wide = read_options(None, causal, (2**40, 2**40), 0.0)
    problem = dense(wide)
    assert max(problem.window_left, problem.window_right) < 2**31
    q, k, v = torch.randn(2, 5, 6, 16), torch.randn(2, 7, 2, 16), torch.randn(2, 7, 2, 24)
    out = fast_attn_func(q, k, v, causal=causal, window_size=(2**40, 2**40), backend="sdpa")
    torch.testing.assert_close(out, fast_attn_func(q, k, v, causal=causal, backend="sdpa"))


def test_only_a_strided_last_axis_is_copied() -> None:
    wide = torch.randn(1, 3, 4, 16)
    q, k, v = wide[:, :, ::2, :8], wide[..., ::2], wide.transpose(1, 2)[..., :8]
    _, inputs = prepare_dense(q, k[:, :, :2], v[:, :3, :2], Options())
    assert inputs.q is q
    assert inputs.k.is_contiguous()
    assert inputs.v.data_ptr() == wide.data_ptr()


def test_bias_is_expanded_without_a_copy() -> None:
    q, bias = torch.zeros(2, 3, 4, 8), torch.randn(4, 1, 3)
    _, inputs = prepare_dense(q, q, q, Options(), attn_bias=bias)
    assert inputs.attn_bias.shape == (2, 4, 3, 3)
    assert inputs.attn_bias.data_ptr() == bias.data_ptr()


def test_per_head_tensors_become_float32() -> None:
    q, half = torch.zeros(2, 3, 4, 8), torch.ones(4).half()
    _, inputs = prepare_dense(q, q, q, Options(), alibi_slopes=half, sinks=half.double())
    assert inputs.alibi_slopes.dtype is inputs.sinks.dtype is torch.float32
