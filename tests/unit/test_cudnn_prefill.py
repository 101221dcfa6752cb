"""Prefill by cuDNN on Hopper: which calls it serves automatically, and how."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from fastattention.attention.problem import AttentionOutput, Inputs, Problem
from fastattention.attention.reference import reference_attention
from fastattention.attention.validation import Options, prepare_dense
from fastattention.backends.sdpa import cudnn_prefill, gpu_kernels
from fastattention.backends.sdpa.backend import SdpaBackend
from fastattention.engine.explain import Explanation
from fastattention.engine.registry import Verdict
from unit.test_sdpa_gpu_kernels import FULL, LOWER_RIGHT, REFUSED, SQUARE, Kernel

LONG_FULL = replace(FULL, batch_size=1, seqlen_q=1024, seqlen_k=1024, nheads=32, headdim=128, headdim_v=128)
LONG = replace(LONG_FULL, seqlen_q=4096, seqlen_k=4096, window_right=0)


pytestmark = pytest.mark.usefixtures("hopper")


@pytest.mark.parametrize("problem", [LONG, LONG_FULL], ids=["causal", "full"])
@pytest.mark.parametrize(
    "changes", [{}, {"return_lse": False}, {"dtype": torch.float16}, {"headdim": 256, "headdim_v": 256}], ids=str
)
def test_long_prefill_is_faster_by_cudnn(problem: Problem, changes: dict[str, Any]) -> None:
    assert "as fast as our kernels" in cudnn_prefill.why_faster(replace(problem, **changes))


@pytest.mark.parametrize("changes", [one for one in REFUSED if one != {"return_lse": False}], ids=str)
@pytest.mark.parametrize("problem", [LONG, LONG_FULL], ids=["causal", "full"])
def test_what_cudnn_cannot_compute_is_not_its(problem: Problem, changes: dict[str, Any]) -> None:
    assert cudnn_prefill.why_faster(replace(problem, **changes)) is None


@pytest.mark.parametrize(
    ("problem", "seqlen_q", "seqlen_k", "batch_size", "is_faster"),
    [
        (LONG, 2470, 2470, 1, False),
        (LONG, 2471, 2471, 1, True),
        (LONG, 873, 873, 8, False),
        (LONG, 874, 874, 8, True),
        (LONG_FULL, 596, 1024, 1, False),
        (LONG_FULL, 597, 1024, 1, True),
        (LONG_FULL, 127, 131072, 1, False),  # few queries are a decode
        (LONG_FULL, 128, 131072, 1, True),
        (LONG, 2048, 32768, 1, False),  # cuDNN lacks this mask
    ],
)
def test_calls_with_little_to_compute_stay_ours(
    problem: Problem, seqlen_q: int, seqlen_k: int, batch_size: int, is_faster: bool
) -> None:
    """Building a plan of cuDNN takes longer than they save."""
    problem = replace(problem, seqlen_q=seqlen_q, seqlen_k=seqlen_k, batch_size=batch_size)
    assert (cudnn_prefill.why_faster(problem) is not None) == is_faster


TRAINING = replace(LONG, return_lse=False, grads=("q", "k", "v"))


@pytest.mark.parametrize("problem", [TRAINING, replace(TRAINING, window_right=-1), replace(TRAINING, grads=("v",))])
def test_its_backward_is_faster_too(problem: Problem) -> None:
    assert "backward" in cudnn_prefill.why_faster(problem)


SHORT = {"seqlen_q": 1024, "seqlen_k": 1024}
UNLIKE = [{"deterministic": True}, {"in_transform": True}, {"softcap": 3.0}, {"dropout_p": 0.1}, SHORT]


@pytest.mark.parametrize("changes", [{"return_lse": True}, *UNLIKE], ids=str)  # it has no gradient of lse
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_other_gradients_stay_ours(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], capability: tuple[int, int]
) -> None:
    monkeypatch.setattr(gpu_kernels, "_capability", lambda device: capability)
    assert SdpaBackend().why_faster(replace(TRAINING, **changes)) is None


def test_it_asks_the_gpu_and_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
        assert cudnn_prefill.why_faster(LONG) is None
    for capability, is_faster in (((8, 0), False), ((8, 9), False), ((10, 0), True)):
        monkeypatch.setattr(gpu_kernels, "_capability", lambda device, found=capability: found)
        assert (cudnn_prefill.why_faster(LONG) is not None) == is_faster
    monkeypatch.setattr(gpu_kernels, "_cudnn_takes", lambda problem: False)
    assert cudnn_prefill.why_faster(LONG) is None


def test_an_explanation_says_so() -> None:
    backend = SdpaBackend()
    verdicts = (
        Verdict("cuda", None, "the forward kernel"),
        Verdict("cpu", "no CPU tensors"),
        Verdict("sdpa", None, backend.how(LONG), backend.why_faster(LONG)),
    )
    explanation = Explanation(LONG, verdicts)
    assert explanation.backend == "sdpa"
    assert str(explanation).splitlines()[1:] == [
        "   cuda: could serve this call by the forward kernel",
        "   cpu: no CPU tensors",
        "-> sdpa: serves this call by cuDNN; faster here: 1.3 to 1.7 times as fast as our kernels on an H200",
    ]
    assert backend.how(LOWER_RIGHT) == ""


class CudnnCall:
    """A problem in bfloat16, with its tensors, here on the CPU, and its exact result."""

    def __init__(self, problem: Problem) -> None:
        self.problem = replace(problem, batch_size=2)
        q, k, v = (
            torch.randn(2, seqlen, nheads, 64).to(torch.bfloat16)
            for seqlen, nheads in ((problem.seqlen_q, 4), (problem.seqlen_k, 2), (problem.seqlen_k, 2))
        )
        options = Options(softmax_scale=problem.softmax_scale, causal=problem.is_causal, return_lse=problem.return_lse)
        checked, self.inputs = prepare_dense(q, k, v, options)
        self.exact = reference_attention(checked, self.inputs)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    computing = Kernel("_scaled_dot_product_cudnn_attention", (6, 5, 4))
    monkeypatch.setattr(torch, "_scaled_dot_product_cudnn_attention", computing)
    for least in ("_LEAST_QUERIES", "_LEAST_OPERATIONS", "_LEAST_OPERATIONS_CAUSAL"):
        monkeypatch.setattr(cudnn_prefill, least, 1)
    return computing


@pytest.mark.parametrize("problem", [FULL, SQUARE], ids=["full", "causal"])
@pytest.mark.parametrize("return_lse", [False, True], ids=["out", "lse"])
def test_its_plan_calls_the_operator(kernel: Kernel, problem: Problem, return_lse: bool) -> None:
    call = CudnnCall(replace(problem, return_lse=return_lse))
    out, lse, mask = SdpaBackend().make_call(call.problem, call.inputs)(call.inputs)
    assert kernel.calls == 1
    assert torch.equal(out, call.exact.out.to(torch.bfloat16))
    assert out.is_contiguous()
    assert (lse is not None) == return_lse
    if lse is not None and call.exact.lse is not None:
        assert torch.equal(lse, call.exact.lse.float())
    assert mask is None


def test_its_plan_leaves_other_tensors_to_the_rest(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    call, general = CudnnCall(FULL), AttentionOutput(torch.zeros(1), None)
    monkeypatch.setattr(SdpaBackend, "_forward", lambda self, problem, inputs: general)
    attend = SdpaBackend().make_call(call.problem, call.inputs)
    with sdpa_kernel([SDPBackend.MATH]):
        assert attend(call.inputs) is general
    memory = torch.randn(call.inputs.k.numel() + 1).to(torch.bfloat16)
    assert attend(call.inputs._replace(k=memory[1:].view_as(call.inputs.k))) is general
    gaps = torch.randn(2, 40, 2, 65).to(torch.bfloat16)[..., :64]
    strided: Inputs = call.inputs._replace(v=gaps)
    assert SdpaBackend().make_call(call.problem, strided)(strided) is general
    assert kernel.calls == 0
    attend(call.inputs)
    assert kernel.calls == 1
