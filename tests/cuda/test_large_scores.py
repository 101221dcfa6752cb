"""Scores of any size that float32 has, in CUDA kernels: under the emulator, and on the GPU of this machine."""

from __future__ import annotations

import emulator
import pytest
import torch
from conformance.large_scores import (
    SCALES,
    check_large_gradients,
    check_large_products,
    check_large_scores,
    check_large_sinks,
)
from tiers import sampled

from fastattention.attention.backend import ATTENTION_BACKENDS, AttentionBackend

DEVICE = "cuda:0" if ATTENTION_BACKENDS.get("cuda").why_unavailable() is None else None
NAMES = [*(backend.name for backend in emulator.EMULATED), *(["cuda"] if DEVICE else [])]


@pytest.fixture(params=NAMES)
def backend(request: pytest.FixtureRequest) -> AttentionBackend:
    emulated = {one.name: one for one in emulator.EMULATED}
    return emulated[request.param]() if request.param in emulated else ATTENTION_BACKENDS.get("cuda")


def device_of(backend: AttentionBackend) -> str:
    return DEVICE if backend.name == "cuda" and DEVICE else "cpu"


@sampled
@pytest.mark.parametrize("cached", [False, True], ids=["dense", "cache"])
def test_a_bias_may_be_as_large_as_float32_has_it(backend: AttentionBackend, cached: bool) -> None:
    check_large_scores(backend, torch.float16, 1, 300, cached, device_of(backend))


@sampled
@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize(("scale", "size"), SCALES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_products_may_be_large(
    backend: AttentionBackend, dtype: torch.dtype, scale: float, size: float, rows: int
) -> None:
    if dtype is torch.bfloat16 and backend.name in ("cuda-sm60", "cuda-sm70", "cuda-sm75"):
        pytest.skip("these GPUs compute bfloat16 in float16, which has no such numbers")
    check_large_products(backend, dtype, scale, size, rows, device_of(backend))


@pytest.mark.parametrize(("scale", "size"), [SCALES[0], SCALES[-1]])
def test_products_in_int8_may_be_large(backend: AttentionBackend, scale: float, size: float) -> None:
    check_large_products(backend, torch.float16, scale, size, 20, device_of(backend), qk_dtype="int8")


@sampled
@pytest.mark.parametrize("modified", [False, True])
def test_sinks_may_be_large(backend: AttentionBackend, modified: bool) -> None:
    check_large_sinks(backend, torch.float16, modified, device_of(backend))


@sampled
@pytest.mark.parametrize("scale", [None, 1e9])
def test_gradients_of_large_scores_are_finite_and_right(backend: AttentionBackend, scale: float | None) -> None:
    check_large_gradients(backend, torch.float16, scale, device_of(backend))
