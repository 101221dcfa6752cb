"""Kernels and refusals of the cuda backend, without a GPU."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from fastattention.attention.backend import ATTENTION_BACKENDS
from fastattention.attention.problem import Layout
from fastattention.backends.cuda.attention.backend import CudaBackend
from fastattention.errors import CompileError
from fastattention.gpu_runtime import cache, compiler, module
from fastattention.gpu_runtime.chips import CHIPS
from unit.samples import problem_of

PROBLEM = problem_of(batch_size=2, seqlen_k=256, headdim=64, window_right=0)


A100 = list(CHIPS).index("A100")
CACHE: dict[str, Any] = {"layout": Layout.KVCACHE, "seqlen_q": 1, "total_q": 2}


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> CudaBackend:
    """The backend of a machine with every chip, in their order, and one that is too old."""
    devices = [*CHIPS.values(), CHIPS["P100"]._replace(target=52)]
    monkeypatch.setattr(module, "device_limits", lambda index: devices[index])
    return CudaBackend()


SERVED: dict[str, dict[str, Any]] = {
    "dense": {},
    "varlen": {"layout": Layout.VARLEN, "total_q": 200},
    "paged": {"layout": Layout.VARLEN, "page_block_size": 16},
    "window": {"window_left": 5, "window_right": 3},
    "scores": {"softcap": 30.0, "score_tensors": ("alibi_slopes", "attn_bias", "sinks")},
    "head dimensions": {"headdim": 256, "headdim_v": 40},
    "lse": {"return_lse": True, "deterministic": True},
    "gradients": {"grads": ("q", "k", "v", "sinks"), "deterministic": True},
    "dropout": {"dropout_p": 0.5, "grads": ("q",)},
    "cache": CACHE,
    "append": {**CACHE, "seqlen_new": 1, "rotary_dim": 32},
    "cache in pages": {**CACHE, "page_block_size": 16, "num_splits": 4},
    "int8": {**CACHE, "cache_dtype": torch.int8},
    "float8": {**CACHE, "cache_dtype": torch.float8_e4m3fn, "seqlen_new": 1, "page_block_size": 16},
}


@pytest.mark.parametrize("index", range(len(CHIPS)), ids=list(CHIPS))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("call", SERVED.values(), ids=SERVED)
def test_calls_on_every_chip_are_served(
    backend: CudaBackend, index: int, dtype: torch.dtype, call: dict[str, Any]
) -> None:
    problem = dataclasses.replace(PROBLEM, device=torch.device("cuda", index), dtype=dtype, **call)
    assert backend.why_not(problem) is None


OLD, SDPA = torch.device("cuda", len(CHIPS)), "; use backend='sdpa'"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "cpu": ({"device": torch.device("cpu")}, "tensors are on cpu; the cuda backend takes tensors on cuda"),
    "too old": ({"device": OLD}, f"{OLD} has compute capability 5.2; Pascal (6.0) is the oldest that is served"),
    "float32": ({"dtype": torch.float32}, "float32 is not served; use float16 or bfloat16, or backend='sdpa'"),
    "bias": ({"grads": ("attn_bias",)}, f"attn_bias requires a gradient, which cuda does not compute{SDPA}"),
    "pages": ({"grads": ("q",), "page_block_size": 16}, "k and v are pages, whose gradients are not computed"),
    "wide": (
        {"grads": ("q",), "headdim": 288},
        f"headdim=288: no kernels for gradients of this call fit the GPU; those from 1 to 256 do{SDPA}",
    ),
    "mask": ({"dropout_p": 0.5, "return_mask": True}, "return_attn_probs with dropout is not served"),
    "float32 cache": ({**CACHE, "dtype": torch.float32}, "float32 is not served"),
    "unknown": ({"score_tensors": ("unknown",), "softcap": 3.0}, "cuda does not serve unknown; leave it out"),
}


@pytest.mark.parametrize(("call", "reason"), REFUSED.values(), ids=REFUSED)
def test_a_refusal_says_why(backend: CudaBackend, call: dict[str, Any], reason: str) -> None:
    assert reason in (backend.why_not(dataclasses.replace(PROBLEM, **call)) or "served")


PREFILL = {"layout": Layout.KVCACHE, "batch_size": 40, "total_q": 40 * 128}
KERNELS: dict[str, tuple[dict[str, Any], str]] = {
    "dense": ({}, ""),
    "varlen": ({"layout": Layout.VARLEN, "page_block_size": 16}, ""),
    "decode": (CACHE, "the decode kernel"),
    "append": ({**CACHE, "seqlen_new": 1, "page_block_size": 16}, "the decode kernel"),
    "prefill": (PREFILL, "the forward kernel"),
    "int8": ({**PREFILL, "cache_dtype": torch.int8}, "the decode kernel"),
    "gradients": ({"grads": ("q",)}, "kernels of its own, forward and backward"),
}


@pytest.mark.parametrize(("call", "how"), KERNELS.values(), ids=KERNELS)
def test_it_says_which_kernel_serves_a_cache(backend: CudaBackend, call: dict[str, Any], how: str) -> None:
    assert backend.how(dataclasses.replace(PROBLEM, **call)) == how


def launches(backend: CudaBackend, **call: Any) -> list[tuple[str, int]]:
    """(entry, CTAs) of the launches of a call."""
    launches = backend._launches(dataclasses.replace(PROBLEM, device=torch.device("cuda", A100), **call))
    steps = [launches.append] if launches.append is not None else []
    return [(step.variant.entries[step.entry].name, step.num_ctas) for step in [*steps, *launches.attention]]


def test_a_decode_of_few_rows_is_one_kernel(backend: CudaBackend) -> None:
    assert launches(backend, **CACHE) == [("fastattention_decode", 4 * 2)]  # 2 sequences of 256 keys, 2 heads, 128 each
    assert launches(backend, **CACHE, seqlen_new=1)[0] == ("fastattention_append", 2)  # 8 rows, 4 warps


def test_many_rows_are_merged_by_another_kernel(backend: CudaBackend) -> None:
    call = {"layout": Layout.KVCACHE, "seqlen_q": 16, "total_q": 32}
    # 2 sequences, 2 heads, 64 rows each; a row is merged by 4 of the 16 teams of a CTA.
    (decode, _), combine = launches(backend, **call)
    assert (decode, *combine) == ("fastattention_decode", "fastattention_combine", 2 * 2 * 64 // 4)
    assert [name for name, _ in launches(backend, **call, seqlen_k=30)] == ["fastattention_decode"]  # in one tile


def test_nothing_is_launched_for_nothing(backend: CudaBackend) -> None:
    assert launches(backend, layout=Layout.KVCACHE, batch_size=0, total_q=0) == []
    empty = {"layout": Layout.KVCACHE, "seqlen_q": 0, "total_q": 0}
    assert launches(backend, **empty) == []
    assert [name for name, _ in launches(backend, **empty, seqlen_new=1)] == ["fastattention_append"]


def test_a_kernel_is_chosen_once_for_equal_problems(backend: CudaBackend) -> None:
    problem = dataclasses.replace(PROBLEM, **CACHE)
    assert backend._launches(problem) is backend._launches(dataclasses.replace(problem))
    assert backend._launches(problem) is not backend._launches(dataclasses.replace(problem, seqlen_k=257))


def test_the_backend_is_unavailable_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert CudaBackend().why_unavailable() == "torch sees no CUDA device"


def test_the_backend_is_unavailable_without_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise CompileError("kernels are launched through cuda-bindings [a test]")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(module, "driver_bindings", missing)
    assert CudaBackend().why_unavailable() == "kernels are launched through cuda-bindings [a test]"


def test_gpus_are_asked_before_processors() -> None:
    order = list(ATTENTION_BACKENDS.order)
    assert "cuda" not in order or order.index("cuda") < order.index("cpu")


def test_without_compiler_and_built_kernels_the_backend_is_not_available(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "driver_bindings", lambda: None)
    monkeypatch.setattr(compiler, "why_unavailable", lambda: "no NVRTC")
    monkeypatch.setattr(cache, "BUILT_AHEAD", tmp_path / "absent")
    assert module.why_unavailable() == "no NVRTC"
    monkeypatch.setattr(cache, "BUILT_AHEAD", tmp_path)
    assert module.why_unavailable() is None


@pytest.mark.parametrize("current", [0, 1])
def test_a_kernel_is_enqueued_on_the_device_of_its_call(
    backend: CudaBackend, monkeypatch: pytest.MonkeyPatch, current: int
) -> None:
    """It uses that device's current stream, for any current device, which may change between calls of a plan."""
    entered: list[int] = []
    launched: list[tuple[int, int]] = []

    class Device:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            entered.append(self.index)

        def __exit__(self, *_: object) -> None:
            entered.append(-1)

    function = mock.Mock(launch=lambda params, num_ctas, stream: launched.append((num_ctas, stream)))
    monkeypatch.setattr(module.KernelLaunch, "function", lambda self, index: function)
    monkeypatch.setattr(module, "current_stream", lambda index: 70 + index)
    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(module, "current_device", lambda: current)
    enqueue = backend._launcher(module.KernelLaunch(mock.Mock(), 0, 5), PROBLEM)
    enqueue(mock.Mock())
    assert launched == [(5, 70)]
    assert entered == ([] if current == 0 else [0, -1])
