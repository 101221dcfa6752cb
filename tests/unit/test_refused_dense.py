"""Every wrong argument of fast_attn_func, and of the arguments that all functions share."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch

from fastattention import fast_attn_func
from unit.refusals import Refusal, assert_refused, refusals

META = torch.device("meta")


def arguments() -> dict[str, Any]:
    """A call that is accepted: batch_size=2, seqlen_q=5, seqlen_k=7, nheads=4, nheads_k=2, headdim=16, headdim_v=24."""
    return {
        "q": torch.zeros(2, 5, 4, 16),
        "k": torch.zeros(2, 7, 2, 16),
        "v": torch.zeros(2, 7, 2, 24),
        "backend": "sdpa",
    }


def test_the_call_without_changes_is_accepted() -> None:
    assert fast_attn_func(**arguments()).shape == (2, 5, 4, 24)


TENSORS = (
    Refusal("q_list", {"q": [1.0]}, ("q must be a torch.Tensor", "list")),
    Refusal("q_array", {"q": numpy.zeros((2, 5, 4, 16))}, ("q must be a torch.Tensor", "ndarray")),
    Refusal("q_none_with_dropout", {"q": None, "dropout_p": 0.5}, ("q must be a torch.Tensor", "NoneType")),
    Refusal("k_none", {"k": None}, ("k must be a torch.Tensor", "NoneType")),
    Refusal("v_float", {"v": 1.0}, ("v must be a torch.Tensor", "float")),
    Refusal("alibi_list", {"alibi_slopes": [0.5]}, ("alibi_slopes must be a torch.Tensor", "list")),
    Refusal("bias_float", {"attn_bias": 0.0}, ("attn_bias must be a torch.Tensor", "float")),
    Refusal("sinks_list", {"sinks": [0.0]}, ("sinks must be a torch.Tensor", "list")),
)

DTYPES_AND_DEVICES = (
    Refusal(
        "q_int32",
        {"q": torch.zeros(2, 5, 4, 16, dtype=torch.int32)},
        ("q has dtype", "int32", "float16, bfloat16, float32"),
    ),
    Refusal("q_float64", {"q": torch.zeros(2, 5, 4, 16, dtype=torch.float64)}, ("q has dtype", "float64", "bfloat16")),
    Refusal(
        "k_float16",
        {"k": torch.zeros(2, 7, 2, 16, dtype=torch.float16)},
        ("k has dtype torch.float16", "q has torch.float32", "must be the same"),
    ),
    Refusal(
        "v_bfloat16",
        {"v": torch.zeros(2, 7, 2, 24, dtype=torch.bfloat16)},
        ("v has dtype torch.bfloat16", "q has torch.float32", "must be the same"),
    ),
    Refusal("k_meta", {"k": torch.zeros(2, 7, 2, 16, device=META)}, ("k is on meta", "q on cpu", "same device")),
    Refusal("v_meta", {"v": torch.zeros(2, 7, 2, 24, device=META)}, ("v is on meta", "q on cpu", "same device")),
    Refusal("alibi_meta", {"alibi_slopes": torch.zeros(4, device=META)}, ("alibi_slopes is on meta", "same device")),
    Refusal("bias_meta", {"attn_bias": torch.zeros(5, 7, device=META)}, ("attn_bias is on meta", "same device")),
    Refusal("sinks_meta", {"sinks": torch.zeros(4, device=META)}, ("sinks is on meta", "q on cpu", "same device")),
)

SHAPES = (
    Refusal("q_rank", {"q": torch.zeros(5, 4, 16)}, ("q must be (batch_size, seqlen_q, nheads", "(5, 4, 16)")),
    Refusal("q_scalar", {"q": torch.zeros(())}, ("q must be (batch_size, seqlen_q, nheads, headdim)", "()")),
    Refusal("k_rank", {"k": torch.zeros(7, 2, 16)}, ("k must be (batch_size, seqlen_k, nheads_k", "(7, 2, 16)")),
    Refusal("v_rank", {"v": torch.zeros(1, 2, 7, 2, 24)}, ("v must be", "headdim_v)", "(1, 2, 7, 2, 24)")),
    Refusal("k_batch", {"k": torch.zeros(3, 7, 2, 16)}, ("q, k and v must have one batch_size", "2, 3 and 2")),
    Refusal("v_batch", {"v": torch.zeros(1, 7, 2, 24)}, ("q, k and v must have one batch_size", "2, 2 and 1")),
    Refusal("v_length", {"v": torch.zeros(2, 6, 2, 24)}, ("v has seqlen_k 6", "k has 7", "must be the same")),
    Refusal("v_heads", {"v": torch.zeros(2, 7, 4, 24)}, ("v has 4 heads", "k has 2", "must be the same")),
    Refusal("k_headdim", {"k": torch.zeros(2, 7, 2, 8)}, ("k has headdim 8", "q has 16", "must be the same")),
    Refusal("heads_not_divided", {"q": torch.zeros(2, 5, 3, 16)}, ("nheads=3", "multiple of nheads_k=2")),
    Refusal("fewer_query_heads", {"q": torch.zeros(2, 5, 1, 16)}, ("nheads=1", "multiple of nheads_k=2")),
    Refusal("no_query_heads", {"q": torch.zeros(2, 5, 0, 16)}, ("nheads=0", "positive multiple of nheads_k=2")),
    Refusal(
        "no_heads_at_all",
        {"k": torch.zeros(2, 7, 0, 16), "v": torch.zeros(2, 7, 0, 24)},
        ("nheads=4", "multiple of nheads_k=0"),
    ),
    Refusal(
        "headdim_577",
        {"q": torch.zeros(2, 5, 4, 577), "k": torch.zeros(2, 7, 2, 577)},
        ("headdim=577", "allowed are 1 to 576"),
    ),
    Refusal(
        "headdim_0",
        {"q": torch.zeros(2, 5, 4, 0), "k": torch.zeros(2, 7, 2, 0)},
        ("headdim=0", "allowed are 1 to 576"),
    ),
    Refusal("headdim_v_513", {"v": torch.zeros(2, 7, 2, 513)}, ("headdim_v=513", "allowed are 1 to 512")),
    Refusal("headdim_v_0", {"v": torch.zeros(2, 7, 2, 0)}, ("headdim_v=0", "allowed are 1 to 512")),
)

PER_HEAD = (
    Refusal("sinks_shape", {"sinks": torch.zeros(2)}, ("sinks must be (nheads) = (4,)", "(2,)")),
    Refusal("sinks_rank", {"sinks": torch.zeros(2, 4)}, ("sinks must be (nheads) = (4,)", "(2, 4)")),
    Refusal("sinks_dtype", {"sinks": torch.zeros(4, dtype=torch.int64)}, ("sinks must be floating point", "int64")),
    Refusal(
        "alibi_shape",
        {"alibi_slopes": torch.zeros(5)},
        ("alibi_slopes must be (nheads,) = (4,)", "(2, 4)", "shape (5,)"),
    ),
    Refusal("alibi_batch", {"alibi_slopes": torch.zeros(3, 4)}, ("alibi_slopes must be", "= (2, 4)", "shape (3, 4)")),
    Refusal(
        "alibi_dtype",
        {"alibi_slopes": torch.zeros(4, dtype=torch.int32)},
        ("alibi_slopes must be floating point", "int32"),
    ),
)

BIAS = (
    Refusal(
        "bias_bool",
        {"attn_bias": torch.zeros(5, 7, dtype=torch.bool)},
        ("attn_bias must be float32 or the dtype of q", "torch.bool", "torch.where(mask, 0.0, -torch.inf)"),
    ),
    Refusal(
        "bias_float16",
        {"attn_bias": torch.zeros(5, 7, dtype=torch.float16)},
        ("attn_bias must be float32 or the dtype of q (torch.float32)", "got torch.float16"),
    ),
    Refusal(
        "bias_keys",
        {"attn_bias": torch.zeros(5, 6)},
        ("attn_bias must broadcast to (batch_size, nheads, seqlen_q, seqlen_k) = (2, 4, 5, 7)", "shape (5, 6)"),
    ),
    Refusal("bias_heads", {"attn_bias": torch.zeros(2, 2, 5, 7)}, ("attn_bias", "(2, 4, 5, 7)", "shape (2, 2, 5, 7)")),
    Refusal("bias_rank", {"attn_bias": torch.zeros(1, 1, 1, 5, 7)}, ("attn_bias", "(2, 4, 5, 7)", "(1, 1, 1, 5, 7)")),
)

KEPT = torch.ones(2, 4, 1, 1, dtype=torch.bool)
BLOCKS = (
    Refusal("blocks_list", {"block_mask": [[True]]}, ("block_mask must be a torch.Tensor", "list")),
    Refusal("blocks_float", {"block_mask": KEPT.float()}, ("block_mask must be bool", "True where", "torch.float32")),
    Refusal("blocks_meta", {"block_mask": KEPT.to(META)}, ("block_mask is on meta", "q on cpu", "same device")),
    Refusal(
        "blocks_heads",
        {"block_mask": KEPT[:, :3]},
        ("block_mask must be (batch_size or 1, nheads or 1", "(2 or 1, 4 or 1, 1, 1)", "(128, 128)", "(2, 3, 1, 1)"),
    ),
    Refusal("blocks_rank", {"block_mask": KEPT[0, 0]}, ("block_mask must be", "(2 or 1, 4 or 1, 1, 1)", "(1, 1)")),
    Refusal("blocks_rows", {"block_mask": KEPT.repeat(1, 1, 5, 1)}, ("block_mask must be", "shape (2, 4, 5, 1)")),
    Refusal(
        "block_size_96",
        {"block_mask": KEPT, "block_size": 96},
        ("block_size=96", "one or two multiples of 64 from 64 to 16777216"),
    ),
    Refusal("block_size_0", {"block_mask": KEPT, "block_size": (64, 0)}, ("block_size=(64, 0)", "multiples of 64")),
    Refusal("block_size_three", {"block_mask": KEPT, "block_size": (64, 64, 64)}, ("block_size=", "one or two")),
    Refusal("block_size_float", {"block_mask": KEPT, "block_size": 64.0}, ("block_size must be", "64.0")),
    Refusal("block_size_huge", {"block_mask": KEPT, "block_size": 2**25}, ("block_size=33554432", "to 16777216")),
    Refusal("block_size_text", {"block_mask": KEPT, "block_size": "64"}, ("block_size must be", "'64'")),
    Refusal("block_size_alone", {"block_size": 64}, ("block_size=64 was given without block_mask",)),
)

SCALARS = (
    Refusal("scale_nan", {"softmax_scale": float("nan")}, ("softmax_scale=nan", "finite")),
    Refusal("scale_inf", {"softmax_scale": float("inf")}, ("softmax_scale=inf", "finite")),
    Refusal("scale_float32", {"softmax_scale": 1e39}, ("softmax_scale=1e+39", "finite in float32")),
    Refusal("scale_huge", {"softmax_scale": 10**400}, ("softmax_scale is an integer that no float holds",)),
    Refusal("scale_text", {"softmax_scale": "0.5"}, ("softmax_scale must be a number", "'0.5'")),
    Refusal("scale_tensor", {"softmax_scale": torch.tensor(0.5)}, ("softmax_scale must be a number", "tensor(0.5000)")),
    Refusal("scale_list", {"softmax_scale": [0.5]}, ("softmax_scale must be a number", "[0.5]")),
    Refusal("causal_none", {"causal": None}, ("causal must be True or False", "None")),
    Refusal("causal_text", {"causal": "no"}, ("causal must be True or False", "'no'")),
    Refusal("causal_2", {"causal": 2}, ("causal must be True or False", "2")),
    Refusal("causal_tensor", {"causal": torch.tensor(True)}, ("causal must be True or False", "tensor(True)")),
    Refusal("softcap_negative", {"softcap": -1.0}, ("softcap=-1.0", "at least 0")),
    Refusal("softcap_nan", {"softcap": float("nan")}, ("softcap=nan", "finite")),
    Refusal("softcap_inf", {"softcap": float("inf")}, ("softcap=inf", "finite")),
    Refusal("softcap_float32", {"softcap": 1e39}, ("softcap=1e+39", "finite in float32")),
    Refusal("softcap_subnormal", {"softcap": 1e-39}, ("softcap=1e-39", "no positive one may be below 1.2e-38")),
    Refusal("softcap_none", {"softcap": None}, ("softcap must be a number", "None")),
    Refusal("dropout_1", {"dropout_p": 1.0}, ("dropout_p=1.0", "at least 0 and below 1")),
    Refusal("dropout_negative", {"dropout_p": -0.1}, ("dropout_p=-0.1", "at least 0 and below 1")),
    Refusal("dropout_nan", {"dropout_p": float("nan")}, ("dropout_p=nan", "at least 0 and below 1")),
    Refusal("dropout_none", {"dropout_p": None}, ("dropout_p must be a number", "None")),
    Refusal("deterministic_text", {"deterministic": "yes"}, ("deterministic must be True or False", "'yes'")),
    Refusal("backend", {"backend": "cuda13"}, ("backend='cuda13'", "'auto'", "'cpu'", "'sdpa'")),
    Refusal("backend-no-name", {"backend": ["cpu"]}, ("backend=['cpu']", "'auto'", "'cpu'", "'sdpa'")),
)

WINDOWS = (
    Refusal("window_int", {"window_size": 4}, ("window_size must be two integers (left, right)", "got 4")),
    Refusal("window_none", {"window_size": None}, ("window_size must be two integers (left, right)", "got None")),
    Refusal("window_three", {"window_size": (1, 2, 3)}, ("window_size must be two integers", "(1, 2, 3)")),
    Refusal("window_one", {"window_size": (1,)}, ("window_size must be two integers", "(1,)")),
    Refusal("window_float", {"window_size": (1.5, 0)}, ("window_size must be two integers", "(1.5, 0)")),
    Refusal("window_float_tensor", {"window_size": torch.tensor([1.5, 0.0])}, ("window_size must be two", "tensor(")),
    Refusal("window_left", {"window_size": (-2, 0)}, ("window_size=(-2, 0)", "-1 (unlimited) or at least 0")),
    Refusal("window_right", {"window_size": (0, -5)}, ("window_size=(0, -5)", "-1 (unlimited) or at least 0")),
)


@refusals(*TENSORS, *DTYPES_AND_DEVICES, *SHAPES, *PER_HEAD, *BIAS, *BLOCKS, *SCALARS, *WINDOWS)
def test_wrong_argument_is_refused(refusal: Refusal) -> None:
    # Checks are cached by shape, dtype, device and options: the entry of a good call must not let a wrong one through.
    fast_attn_func(**arguments())
    assert_refused(lambda: fast_attn_func(**(arguments() | refusal.changes)), refusal)


@pytest.mark.parametrize("backend", ["cpu", "sdpa"])
@pytest.mark.parametrize("softmax_scale", [1e-46, -1e-40])
def test_a_scale_that_float32_rounds_to_nothing_is_zero(softmax_scale: float, backend: str) -> None:
    expected = fast_attn_func(**arguments(), softmax_scale=0.0)
    assert torch.equal(fast_attn_func(**arguments() | {"backend": backend}, softmax_scale=softmax_scale), expected)


@pytest.mark.parametrize("softmax_scale", [1, numpy.float32(1.0), True], ids=["int", "float32", "bool"])
def test_any_real_number_is_a_scale(softmax_scale: object) -> None:
    expected = fast_attn_func(**arguments(), softmax_scale=1.0)
    assert torch.equal(fast_attn_func(**arguments(), softmax_scale=softmax_scale), expected)


@pytest.mark.parametrize("causal", [1, numpy.bool_(True)], ids=["int", "bool_"])
def test_any_truth_value_is_a_flag(causal: object) -> None:
    torch.manual_seed(0)
    given = {name: torch.randn_like(x) if isinstance(x, torch.Tensor) else x for name, x in arguments().items()}
    assert torch.equal(fast_attn_func(**given, causal=causal), fast_attn_func(**given, causal=True))
