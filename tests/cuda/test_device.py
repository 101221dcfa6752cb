"""The list of cases on the GPUs of this machine, on every code path that they can run; skipped where there is none."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch
from conformance.calls import Call
from conformance.case import Case
from conformance.cases import CASES
from conformance.check import check
from conformance.devices import copied_back, moved
from conformance.engines import Engine, forget_backends
from torch import Tensor

from fastattention import fast_attn_func
from fastattention.backends.cuda.chips import ARCHS
from fastattention.backends.registry import get_backend, verdict
from fastattention.problem import Problem

pytestmark = pytest.mark.skipif(get_backend("cuda").why_unavailable() is not None, reason="needs a GPU")


class DeviceEngine(Engine):
    """The cuda backend on the first GPU; `isa` holds the code path, e.g. "70"."""

    @contextmanager
    def active(self) -> Iterator[None]:
        assert self.isa is not None
        with mock.patch.dict(os.environ, FASTATTENTION_CUDA_ARCH=self.isa):
            forget_backends()
            yield
        forget_backends()

    def refusal(self, problem: Problem) -> str | None:
        return verdict(replace(problem, device=torch.device("cuda:0")), self.backend).reason

    def run(self, call: Call) -> tuple[Tensor, Tensor]:
        on_device = moved(call, "cuda")
        out, lse = on_device.run(self.backend)
        copied_back(call, on_device)
        return out.cpu(), lse.cpu()

    def run_without_lse(self, call: Call) -> Tensor:
        return moved(call, "cuda").run_without_lse(self.backend).cpu()


def _target() -> int:
    major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
    return 10 * major + minor


ENGINES = [DeviceEngine("cuda", str(arch)) for arch in ARCHS if arch <= _target()]
every_engine = pytest.mark.parametrize("engine", ENGINES, ids=[engine.name for engine in ENGINES])

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


@every_engine
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_is_right_repeats_and_writes_nothing_else(engine: Engine, dtype: torch.dtype, case: Case) -> None:
    check(engine, case, dtype)


def _tensors(device: str = "cuda:0") -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    q, k, v = (torch.randn(2, 300, 4, 64, device=device, generator=generator).half() for _ in range(3))
    return q, k, v


def test_a_captured_graph_replays_with_new_numbers() -> None:
    q, k, v = _tensors()
    fast_attn_func(q, k, v, causal=True, backend="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = fast_attn_func(q, k, v, causal=True, backend="cuda")
    q.copy_(torch.randn_like(q))
    graph.replay()
    assert torch.equal(captured, fast_attn_func(q, k, v, causal=True, backend="cuda"))


def test_work_is_in_order_with_the_current_stream() -> None:
    q, k, v = _tensors()
    expected = fast_attn_func(2 * q, k, v, backend="cuda")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        doubled = 2 * q
        out = fast_attn_func(doubled, k, v, backend="cuda")
        result = out + 0
    stream.synchronize()
    assert torch.equal(result, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_of_one_process_agree() -> None:
    first = fast_attn_func(*_tensors("cuda:0"), causal=True, backend="cuda").cpu()
    q, k, v = (tensor.to("cuda:1") for tensor in _tensors("cuda:0"))
    second = fast_attn_func(q, k, v, causal=True, backend="cuda")
    assert second.device == torch.device("cuda:1")
    assert torch.equal(first, second.cpu())


def test_offsets_beyond_32_bits() -> None:
    """Keys of the last head lie more than 2^31 elements behind those of the first."""
    free, _ = torch.cuda.mem_get_info()
    nheads, seqlen, headdim = 3, 1 << 24, 64
    if free < 3 * 2 * nheads * seqlen * headdim:
        pytest.skip("needs 20 GB of free GPU memory")
    k = torch.empty(1, nheads, seqlen, headdim, device="cuda", dtype=torch.float16).normal_().transpose(1, 2)
    q = torch.randn(1, 1, nheads, headdim, device="cuda", dtype=torch.float16)
    k_last, q_last = k[:, -300:, -1:], q[:, :, -1:]
    whole = fast_attn_func(q, k, k, window_size=(299, 0), backend="cuda")
    last = fast_attn_func(q_last, k_last, k_last, backend="cuda")
    torch.testing.assert_close(whole[:, :, -1:], last, atol=5e-4, rtol=0)  # another head is off by 0.1
