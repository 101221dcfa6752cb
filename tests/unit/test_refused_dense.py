"""Every wrong argument of fast_attn_func, and of the arguments that all functions share."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from torch import ones, zeros

from fastattention import fast_attn_func
from unit.refusals import Refusal, assert_refused, refusals, refused

META = torch.device("meta")


def arguments() -> dict[str, Any]:
    """A call that is accepted: batch_size=2, seqlen_q=5, seqlen_k=7, nheads=4, nheads_k=2, headdim=16, headdim_v=24."""
    return {"q": zeros(2, 5, 4, 16), "k": zeros(2, 7, 2, 16), "v": zeros(2, 7, 2, 24), "backend": "sdpa"}


def test_the_call_without_changes_is_accepted() -> None:
    assert fast_attn_func(**arguments()).shape == (2, 5, 4, 24)


TENSORS = (
    refused("q must be a torch.Tensor", "list", q=[1.0]),
    refused("q must be a torch.Tensor", "ndarray", "torch.from_numpy(q)", q=numpy.zeros((2, 5, 4, 16))),
    refused("q must be a torch.Tensor", "NoneType", q=None, dropout_p=0.5),
    refused("k must be a torch.Tensor", "NoneType", k=None),
    refused("v must be a torch.Tensor", "float", v=1.0),
    refused("alibi_slopes must be a torch.Tensor", "list", alibi_slopes=[0.5]),
    refused("attn_bias must be a torch.Tensor", "float", attn_bias=0.0),
    refused("sinks must be a torch.Tensor", "list", sinks=[0.0]),
)

DTYPES_AND_DEVICES = (
    refused("q has dtype", "int32", "float16, bfloat16, float32", q=zeros(2, 5, 4, 16, dtype=torch.int32)),
    refused("q has dtype", "float64", "bfloat16", q=zeros(2, 5, 4, 16, dtype=torch.float64)),
    refused("k has dtype torch.float16", "q has torch.float32", "must be the same", k=zeros(2, 7, 2, 16).half()),
    refused("v has dtype torch.bfloat16", "q has torch.float32", "must be the same", v=zeros(2, 7, 2, 24).bfloat16()),
    refused("k is on meta", "q on cpu", "same device", k=zeros(2, 7, 2, 16, device=META)),
    refused("v is on meta", "q on cpu", "same device", v=zeros(2, 7, 2, 24, device=META)),
    refused("alibi_slopes is on meta", "same device", alibi_slopes=zeros(4, device=META)),
    refused("attn_bias is on meta", "same device", attn_bias=zeros(5, 7, device=META)),
    refused("sinks is on meta", "q on cpu", "same device", sinks=zeros(4, device=META)),
)

SHAPES = (
    refused("q must be (batch_size, seqlen_q, nheads", "(5, 4, 16)", q=zeros(5, 4, 16)),
    refused("q must be (batch_size, seqlen_q, nheads, headdim)", "()", q=zeros(())),
    refused("k must be (batch_size, seqlen_k, nheads_k", "(7, 2, 16)", k=zeros(7, 2, 16)),
    refused("v must be", "headdim_v)", "(1, 2, 7, 2, 24)", v=zeros(1, 2, 7, 2, 24)),
    refused("q, k and v must have one batch_size", "2, 3 and 2", k=zeros(3, 7, 2, 16)),
    refused("q, k and v must have one batch_size", "2, 2 and 1", v=zeros(1, 7, 2, 24)),
    refused("v has seqlen_k 6", "k has 7", "must be the same", v=zeros(2, 6, 2, 24)),
    refused("v has 4 heads", "k has 2", "must be the same", v=zeros(2, 7, 4, 24)),
    refused("k has headdim 8", "q has 16", "must be the same", k=zeros(2, 7, 2, 8)),
    refused("nheads=3", "multiple of nheads_k=2", q=zeros(2, 5, 3, 16)),
    refused("nheads=1", "multiple of nheads_k=2", q=zeros(2, 5, 1, 16)),
    refused("nheads=0", "positive multiple of nheads_k=2", q=zeros(2, 5, 0, 16)),
    refused("nheads=4", "multiple of nheads_k=0", k=zeros(2, 7, 0, 16), v=zeros(2, 7, 0, 24)),
    refused("headdim=577", "allowed are 1 to 576", q=zeros(2, 5, 4, 577), k=zeros(2, 7, 2, 577)),
    refused("headdim=0", "allowed are 1 to 576", q=zeros(2, 5, 4, 0), k=zeros(2, 7, 2, 0)),
    refused("headdim_v=513", "allowed are 1 to 512", v=zeros(2, 7, 2, 513)),
    refused("headdim_v=0", "allowed are 1 to 512", v=zeros(2, 7, 2, 0)),
)

PER_HEAD = (
    refused("sinks must be (nheads) = (4,)", "(2,)", sinks=zeros(2)),
    refused("sinks must be (nheads) = (4,)", "(2, 4)", sinks=zeros(2, 4)),
    refused("sinks must be floating point", "int64", sinks=zeros(4, dtype=torch.int64)),
    refused("alibi_slopes must be (nheads,) = (4,)", "(2, 4)", "shape (5,)", alibi_slopes=zeros(5)),
    refused("alibi_slopes must be", "= (2, 4)", "shape (3, 4)", alibi_slopes=zeros(3, 4)),
    refused("alibi_slopes must be floating point", "int32", alibi_slopes=zeros(4, dtype=torch.int32)),
)

BIAS = (
    refused(
        "attn_bias must be float32 or", "torch.bool", "torch.where(mask, 0.0, -torch.inf)", attn_bias=zeros(5, 7).bool()
    ),
    refused(
        "attn_bias must be float32 or the dtype of q (torch.float32)", "got torch.float16", attn_bias=zeros(5, 7).half()
    ),
    refused(
        "attn_bias must broadcast to (batch_size, nheads, seqlen_q, seqlen_k) = (2, 4, 5, 7)",
        "(5, 6)",
        attn_bias=zeros(5, 6),
    ),
    refused("attn_bias", "(2, 4, 5, 7)", "shape (2, 2, 5, 7)", attn_bias=zeros(2, 2, 5, 7)),
    refused("attn_bias", "(2, 4, 5, 7)", "(1, 1, 1, 5, 7)", attn_bias=zeros(1, 1, 1, 5, 7)),
)

KEPT = ones(2, 4, 1, 1, dtype=torch.bool)
BLOCKS = (
    refused("block_mask must be a torch.Tensor", "list", block_mask=[[True]]),
    refused("block_mask must be bool", "True where", "torch.float32", block_mask=KEPT.float()),
    refused("block_mask is on meta", "q on cpu", "same device", block_mask=KEPT.to(META)),
    refused("block_mask must be", "= (2 or 1, 4 or 1, 1, 1)", "(128, 128)", "(2, 3, 1, 1)", block_mask=KEPT[:, :3]),
    refused("block_mask must be", "(2 or 1, 4 or 1, 1, 1)", "(1, 1)", block_mask=KEPT[0, 0]),
    refused("block_mask must be", "shape (2, 4, 5, 1)", block_mask=KEPT.repeat(1, 1, 5, 1)),
    refused("block_size=96", "one or two multiples of 64 from 64 to 16777216", block_mask=KEPT, block_size=96),
    refused("block_size=(64, 0)", "multiples of 64", block_mask=KEPT, block_size=(64, 0)),
    refused("block_size=", "one or two", block_mask=KEPT, block_size=(64, 64, 64)),
    refused("block_size must be", "64.0", block_mask=KEPT, block_size=64.0),
    refused("block_size=33554432", "to 16777216", block_mask=KEPT, block_size=2**25),
    refused("block_size must be", "'64'", block_mask=KEPT, block_size="64"),
    refused("block_size=64 was given without block_mask", block_size=64),
)

SCALARS = (
    refused("softmax_scale=nan", "finite", softmax_scale=float("nan")),
    refused("softmax_scale=inf", "finite", softmax_scale=float("inf")),
    refused("softmax_scale=1e+39", "finite in float32", softmax_scale=1e39),
    refused("softmax_scale is an integer that no float holds", softmax_scale=10**400),
    refused("softmax_scale must be a number", "'0.5'", softmax_scale="0.5"),
    refused("softmax_scale must be a number", "tensor(0.5000)", softmax_scale=torch.tensor(0.5)),
    refused("softmax_scale must be a number", "[0.5]", softmax_scale=[0.5]),
    refused("causal must be True or False", "None", causal=None),
    refused("causal must be True or False", "'no'", causal="no"),
    refused("causal must be True or False", "2", causal=2),
    refused("causal must be True or False", "tensor(True)", causal=torch.tensor(True)),
    refused("softcap=-1.0", "at least 0", softcap=-1.0),
    refused("softcap=nan", "finite", softcap=float("nan")),
    refused("softcap=inf", "finite", softcap=float("inf")),
    refused("softcap=1e+39", "finite in float32", softcap=1e39),
    refused("softcap=1e-39", "no positive one may be below 1.2e-38", softcap=1e-39),
    refused("softcap must be a number", "None", softcap=None),
    refused("dropout_p=1.0", "at least 0 and below 1", dropout_p=1.0),
    refused("dropout_p=-0.1", "at least 0 and below 1", dropout_p=-0.1),
    refused("dropout_p=nan", "at least 0 and below 1", dropout_p=float("nan")),
    refused("dropout_p must be a number", "None", dropout_p=None),
    refused("deterministic must be True or False", "'yes'", deterministic="yes"),
    refused("backend='cuda13'", "'auto'", "'cpu'", "'sdpa'", backend="cuda13"),
    refused("backend=['cpu']", "'auto'", "'cpu'", "'sdpa'", backend=["cpu"]),
)

WINDOWS = (
    refused("window_size must be two integers (left, right)", "got 4", window_size=4),
    refused("window_size must be two integers (left, right)", "got None", window_size=None),
    refused("window_size must be two integers", "(1, 2, 3)", window_size=(1, 2, 3)),
    refused("window_size must be two integers", "(1,)", window_size=(1,)),
    refused("window_size must be two integers", "(1.5, 0)", window_size=(1.5, 0)),
    refused("window_size must be two", "tensor(", window_size=torch.tensor([1.5, 0.0])),
    refused("window_size=(-2, 0)", "-1 (unlimited) or at least 0", window_size=(-2, 0)),
    refused("window_size=(0, -5)", "-1 (unlimited) or at least 0", window_size=(0, -5)),
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
