"""torch's GPU kernels that give lse: the calls that they serve, and their arguments."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fastattention.attention.problem import Layout, Problem
from fastattention.attention.reference import reference_attention
from fastattention.attention.validation import Options, prepare_dense
from fastattention.backends.sdpa import fused, gpu_kernels
from fastattention.backends.sdpa.backend import SdpaBackend
from unit.samples import problem_of

FULL = problem_of(dtype=torch.bfloat16, batch_size=2, seqlen_q=11, seqlen_k=40, nheads=4, headdim=64, return_lse=True)
SQUARE = replace(FULL, seqlen_k=11, window_right=0)
LOWER_RIGHT = replace(FULL, window_right=0)


pytestmark = pytest.mark.usefixtures("hopper")


WIDE = ({"headdim": 8, "headdim_v": 8}, {"headdim": 128, "headdim_v": 128}, {"headdim": 256, "headdim_v": 256})


@pytest.mark.parametrize("changes", [{}, {"dtype": torch.float16}, {"nheads_k": 4}, {"seqlen_q": 1}, *WIDE], ids=str)
def test_all_keys_and_the_square_triangle_are_served(changes: dict[str, Any]) -> None:
    assert gpu_kernels.can_serve(replace(FULL, **changes))
    square = replace(SQUARE, **changes)
    assert gpu_kernels.can_serve(replace(square, seqlen_k=square.seqlen_q))


REFUSED: list[dict[str, Any]] = [
    {"return_lse": False}, {"device": torch.device("cpu")}, {"device": torch.device("xpu", 0)},
    {"layout": Layout.KVCACHE}, {"layout": Layout.VARLEN}, {"dtype": torch.float32}, {"headdim": 96},
    {"headdim_v": 32}, {"headdim": 20, "headdim_v": 20}, {"headdim": 264, "headdim_v": 264}, {"softmax_scale": 0.0},
    {"softmax_scale": -0.125}, {"softcap": 3.0}, {"score_tensors": ("sinks",)}, {"score_tensors": ("alibi_slopes",)},
    {"score_tensors": ("attn_bias",)}, {"dropout_p": 0.1}, {"grads": ("q",)}, {"window_left": 5}, {"batch_size": 0},
    {"seqlen_q": 0, "seqlen_k": 0},
]  # fmt: skip


@pytest.mark.parametrize("changes", REFUSED, ids=str)
@pytest.mark.parametrize("problem", [FULL, SQUARE], ids=["full", "square"])
def test_what_they_cannot_compute_is_refused(problem: Problem, changes: dict[str, Any]) -> None:
    assert not gpu_kernels.can_serve(replace(problem, **changes))


@pytest.mark.parametrize("return_lse", [False, True], ids=["out", "lse"])
def test_a_causal_call_with_more_keys_than_queries_is_flash_attentions(return_lse: bool) -> None:
    problem = replace(LOWER_RIGHT, return_lse=return_lse)
    assert gpu_kernels.can_serve(problem)
    assert gpu_kernels.kernel_of(problem) == "flash"
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
        assert not gpu_kernels.can_serve(problem)


def test_a_single_query_is_flash_attentions() -> None:
    """The lse of cuDNN's kernel is not deterministic. Without lse scaled_dot_product_attention serves the call."""
    problem = replace(LOWER_RIGHT, seqlen_q=1, total_q=2)
    assert gpu_kernels.can_serve(problem)
    assert gpu_kernels.kernel_of(problem) == "flash"
    assert not gpu_kernels.can_serve(replace(problem, return_lse=False))


@pytest.mark.parametrize(
    "changes", [{"seqlen_k": 10}, {"window_right": 3}, {"seqlen_k": 0, "window_right": -1}], ids=str
)
def test_other_masks_are_refused(changes: dict[str, Any]) -> None:
    assert not gpu_kernels.can_serve(replace(SQUARE, **changes))


def test_rocm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert not gpu_kernels.can_serve(FULL)


@pytest.mark.parametrize("headdim", [128, 136])
def test_flash_attention_has_heads_of_128_at_most(headdim: int) -> None:
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
        assert gpu_kernels.can_serve(replace(FULL, headdim=headdim, headdim_v=headdim)) == (headdim <= 128)


CUDNN, FLASH, MATH = SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH


@pytest.mark.parametrize(
    ("capability", "enabled", "kernel"),
    [
        ((9, 0), [CUDNN, FLASH], "cudnn"),
        ((10, 0), [CUDNN, FLASH], "cudnn"),
        ((9, 0), [FLASH, MATH], "flash"),
        ((9, 0), [CUDNN], "cudnn"),
        ((9, 0), [SDPBackend.EFFICIENT_ATTENTION, MATH], None),
        ((8, 9), [CUDNN, FLASH], "flash"),
        ((8, 0), [CUDNN], None),
        ((7, 5), [CUDNN, FLASH], None),
    ],
)
def test_the_kernel_is_one_that_is_switched_on_and_fits_the_gpu(
    capability: tuple[int, int], enabled: list[SDPBackend], kernel: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_kernels, "_capability", lambda device: capability)
    with sdpa_kernel(enabled):
        assert gpu_kernels.kernel_of(FULL) == kernel
        assert gpu_kernels.can_serve(FULL) == (kernel is not None)


class Kernel:
    """An operator of torch that runs on GPUs: checks its arguments by shape inference, then computes them exactly."""

    def __init__(self, name: str, places: tuple[int, int, int | None]) -> None:
        self.calls = 0
        self._real = getattr(torch, name)
        self._causal, self._dropout, self._lse = places

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *rest: Any, scale: float) -> Any:
        self.calls += 1
        arguments = (q, k, v, *rest)
        inferred = self._real(*(x.to("meta") if isinstance(x, Tensor) else x for x in arguments), scale=scale)
        assert arguments[self._dropout] == 0.0
        assert self._lse is None or type(arguments[self._lse]) is bool
        options = Options(softmax_scale=scale, causal=arguments[self._causal], return_lse=True)
        exact = reference_attention(*prepare_dense(*(x.transpose(1, 2) for x in (q, k, v)), options))
        out, lse = exact.out.transpose(1, 2).to(q.dtype), exact.lse.float()
        assert inferred[0].shape == out.shape
        return (out, lse.view(inferred[1].shape), *inferred[2:])


@pytest.fixture(params=["cudnn", "flash"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    name = f"_scaled_dot_product_{request.param}_attention"
    places = {"cudnn": (6, 5, 4), "flash": (4, 3, None)}[request.param]
    computing = Kernel(name, places)  # type: ignore[arg-type]
    monkeypatch.setattr(gpu_kernels, "kernel_of", lambda problem: request.param)
    monkeypatch.setattr(torch, name, computing)
    return computing


@pytest.mark.parametrize("problem", [FULL, SQUARE, LOWER_RIGHT], ids=["full", "square", "lower-right"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_operators_get_what_they_ask_for(kernel: Kernel, problem: Problem, dtype: torch.dtype) -> None:
    q = torch.randn(2, problem.seqlen_q, 4, 64).to(dtype)
    k, v = (torch.randn(2, problem.seqlen_k, 2, 64).to(dtype) for _ in range(2))
    out, lse, mask = gpu_kernels.attend(replace(problem, dtype=dtype), *(x.transpose(1, 2) for x in (q, k, v)))
    options = Options(softmax_scale=problem.softmax_scale, causal=problem is not FULL, return_lse=True)
    expected = reference_attention(*prepare_dense(q, k, v, options))
    assert torch.equal(out, expected.out.transpose(1, 2).to(dtype))
    assert torch.equal(lse, expected.lse.float())
    assert lse.shape == (2, 4, problem.seqlen_q)
    assert mask is None
    assert kernel.calls == 1


def test_heads_share_keys_where_these_kernels_are(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = replace(FULL, return_lse=False)
    assert gpu_kernels.share_keys(plain)
    for changes in ({"dtype": torch.float32}, {"headdim": 264, "headdim_v": 264}, {"device": torch.device("cpu")}):
        assert not gpu_kernels.share_keys(replace(plain, **changes))
    with sdpa_kernel([SDPBackend.MATH]):
        assert not gpu_kernels.share_keys(plain)
    assert gpu_kernels.share_keys(plain)
    for owner, name, older in ((gpu_kernels, "_capability", lambda device: (7, 5)), (torch.version, "hip", "6.0")):
        gpu_kernels._share_keys.cache_clear()
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, older)
            assert not gpu_kernels.share_keys(plain)


@pytest.mark.parametrize("share", [False, True])
def test_groups_are_left_to_kernels_that_know_of_them(share: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_kernels, "share_keys", lambda problem: share)
    seen = []
    given = fused.torch_attention

    def spy(q: Tensor, *others: Tensor, **arguments: Any) -> Tensor:
        seen.append((q.shape[1], arguments.get("enable_gqa", False)))
        return given(q, *others, **arguments)

    monkeypatch.setattr(fused, "torch_attention", spy)
    q, k, v = torch.randn(2, 1, 8, 16), torch.randn(2, 9, 2, 16), torch.randn(2, 9, 2, 16)
    problem, inputs = prepare_dense(q, k, v, Options(causal=True))
    out = SdpaBackend().forward(problem, inputs).out
    assert seen == [(8, True) if share else (2, False)]
    torch.testing.assert_close(out, reference_attention(problem, inputs).out.float())
