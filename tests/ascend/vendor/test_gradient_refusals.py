"""Which gradients are refused, and that a refusal names what was given and what to do. Needs no torch_npu."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from unit.samples import problem_of

from ascend.vendor.engine import VendorBackend
from fastattention.attention.problem import Layout, Problem
from fastattention.backends.ascend import vendor
from fastattention.backends.ascend.backend import AscendBackend, why_not_kernels
from fastattention.backends.ascend.vendor.limits import why_not_inference

DENSE = problem_of(
    device=torch.device("cpu"), dtype=torch.bfloat16, batch_size=2, seqlen_q=100, seqlen_k=120, headdim=64,
    window_right=0, grads=("q", "k", "v"),
)  # fmt: skip
VARLEN = replace(DENSE, layout=Layout.VARLEN)
BOTH = pytest.mark.parametrize("problem", [DENSE, VARLEN], ids=["dense", "varlen"])


@BOTH
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"dtype": torch.float16},
        {"dtype": torch.float32},
        {"window_left": 7, "window_right": 3},
        {"window_right": -1},
        {"softmax_scale": -0.5},
        {"score_tensors": ("sinks",), "grads": ("q", "k", "v", "sinks")},
        {"score_tensors": ("sinks",), "grads": ("sinks",)},
        {"grads": ("v",)},
        {"headdim": 59, "headdim_v": 59},
        {"headdim": 768, "headdim_v": 768},
        {"nheads": 7, "nheads_k": 7},
        {"nheads": 130, "nheads_k": 1},
        {"seqlen_q": 1},
    ],
)
def test_ordinary_training_is_served(problem: Problem, fields: dict[str, Any]) -> None:
    assert vendor.why_not(replace(problem, **fields)) is None


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"return_lse": True}, "return_lse with gradients"),
    ({"deterministic": True}, "deterministic=True with gradients"),
    ({"headdim": 64, "headdim_v": 48}, "headdim_v=48 must equal headdim=64"),
    ({"score_tensors": ("sinks",), "dtype": torch.float32}, "sinks in float32"),
    ({"dropout_p": 0.1}, "dropout_p=0.1"),
    ({"softcap": 2.0}, "softcap=2.0"),
    ({"score_tensors": ("alibi_slopes",)}, "alibi_slopes"),
    ({"score_tensors": ("alibi_slopes",), "grads": ("q", "alibi_slopes")}, "alibi_slopes requires a gradient"),
    ({"score_tensors": ("attn_bias",)}, "attn_bias"),
    ({"score_tensors": ("attn_bias",), "grads": ("attn_bias",)}, "attn_bias requires a gradient"),
    ({"in_transform": True}, "torch.func"),
    ({"in_transform": True, "grads": ()}, "torch.func"),
    ({"page_block_size": 128}, "pages"),
    ({"nheads": 264}, "nheads=264"),
    ({"headdim": 800, "headdim_v": 800}, "headdim=800"),
]


@BOTH
@pytest.mark.parametrize(("fields", "named"), REFUSED, ids=[named for _, named in REFUSED])
def test_a_refusal_names_what_was_given_and_what_to_do(problem: Problem, fields: dict[str, Any], named: str) -> None:
    reason = vendor.why_not(replace(problem, **fields))
    assert reason is not None
    assert named in reason
    assert "use backend='sdpa'" in reason or "use fast_attn_func" in reason


@BOTH
@pytest.mark.parametrize("fields", [{"return_lse": True}, {"deterministic": True}], ids=["lse", "deterministic"])
def test_what_gradients_alone_forbid_is_served_without_them(problem: Problem, fields: dict[str, Any]) -> None:
    assert vendor.why_not(replace(problem, **fields, grads=())) is None
    assert "torch.no_grad()" in (vendor.why_not(replace(problem, **fields)) or "")


def test_a_call_with_a_cache_has_no_backward() -> None:
    reason = vendor.why_not(replace(DENSE, layout=Layout.KVCACHE)) or ""
    assert "fast_attn_with_kvcache has no backward" in reason
    assert "torch.no_grad()" in reason


def test_varlen_batches_beyond_the_limits_are_refused() -> None:
    assert "batch_size=1025" in (vendor.why_not(replace(VARLEN, batch_size=1025)) or "")
    assert "total_q=1048577" in (vendor.why_not(replace(VARLEN, total_q=2**20 + 1)) or "")


def test_the_operator_for_inference_takes_no_gradients() -> None:
    """Dense calls ask for its reasons."""
    assert why_not_inference(replace(DENSE, grads=())) is None
    assert "npu_fused_infer_attention_score has none" in (why_not_inference(DENSE) or "")


def test_our_kernels_refuse_all_gradients() -> None:
    reason = why_not_kernels(DENSE) or ""
    assert "the kernels have no backward; use backend='sdpa' or torch.no_grad()" in reason


@pytest.fixture
def on_npu(monkeypatch: pytest.MonkeyPatch) -> AscendBackend:
    """The backend of users, as if tensors were on an NPU with torch_npu and without Triton-Ascend."""
    for name in ("_why_not_device", "_why_no_operators", "_why_no_compiler", "_why_no_chip"):
        monkeypatch.setattr(AscendBackend, name, lambda *_: None)
    return AscendBackend()


def test_the_backend_trains_with_the_operators_alone(on_npu: AscendBackend) -> None:
    assert on_npu.has_backward
    assert on_npu.why_not(DENSE) is None
    assert on_npu.implementation(DENSE) == "vendor"
    assert on_npu.how(DENSE) == "operators of torch_npu, forward and backward"
    assert on_npu.how(replace(DENSE, grads=())) == "operators of torch_npu"
    capped = replace(DENSE, softcap=3.0)
    assert on_npu.implementation(replace(capped, grads=())) == "triton"
    reason = on_npu.why_not(capped) or ""
    assert "vendor: torch_npu does not serve softcap=3.0" in reason
    assert "triton: a gradient is needed" in reason


def test_our_kernels_chosen_by_name_refuse_training(on_npu: AscendBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTATTENTION_ASCEND", "triton")
    assert (on_npu.why_not(DENSE) or "").startswith("triton: a gradient is needed")


def test_the_backend_of_these_tests_is_the_one_of_users() -> None:
    assert VendorBackend().has_backward
    assert VendorBackend.backward is AscendBackend.backward
