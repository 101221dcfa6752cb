"""Prefill that is sent to cuDNN automatically, on a GPU that has it; skipped elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch
from conformance.cases import CASES
from conformance.check import check
from conformance.engines import GpuEngine, forget_backends
from torch import Tensor

from fastattention import explain, fast_attn_func
from fastattention.attention.backend import ATTENTION_BACKENDS
from fastattention.attention.problem import Problem
from fastattention.backends.sdpa import cudnn_prefill
from fastattention.testing.case import Case, DenseCase

if ATTENTION_BACKENDS.get("cuda").why_unavailable() is not None or torch.cuda.get_device_capability() < (9, 0):
    pytest.skip("needs a GPU of Hopper or newer", allow_module_level=True)

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
every_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())


class CudnnEngine(GpuEngine):
    """The sdpa backend on the first GPU, for calls that cuDNN serves, with the threshold lowered to the smallest."""

    @contextmanager
    def active(self) -> Iterator[None]:
        with mock.patch.multiple(cudnn_prefill, _LEAST_QUERIES=1, _LEAST_OPERATIONS=1, _LEAST_OPERATIONS_CAUSAL=1):
            forget_backends()
            yield
        forget_backends()

    def refusal(self, problem: Problem) -> str | None:
        problem = replace(problem, device=torch.device("cuda:0"))
        if (reason := super().refusal(problem)) is not None:
            return reason
        with self.active():
            return None if cudnn_prefill.why_faster(problem) else "not a call of cuDNN's"


LONG = [
    DenseCase(name="long", batch_size=1, seqlen_q=2925, seqlen_k=2925, nheads=4, nheads_k=2, headdim=128, causal=True),
    DenseCase(name="long-full", batch_size=1, seqlen_q=1001, seqlen_k=4130, nheads=4, nheads_k=4, headdim=64),
    DenseCase(name="headdim-256", batch_size=2, seqlen_q=777, seqlen_k=777, nheads=2, headdim=256, causal=True),
    DenseCase(name="headdim-80", batch_size=2, seqlen_q=300, seqlen_k=300, nheads=2, headdim=80, causal=True),
]


@every_dtype
@pytest.mark.parametrize("case", [*CASES, *LONG], ids=lambda case: case.name)
def test_is_right_repeats_and_writes_nothing_else(dtype: torch.dtype, case: Case) -> None:
    check(CudnnEngine("sdpa"), case, dtype)


Tensors = tuple[Tensor, Tensor, Tensor]


def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensors:
    packed_q, packed_k, packed_v = torch.stack([q, k, v], dim=2).unbind(2)
    return packed_q, packed_k, packed_v


def in_longer_caches(q: Tensor, k: Tensor, v: Tensor) -> Tensors:
    def in_longer(x: Tensor) -> Tensor:
        cache = torch.full((x.shape[0], x.shape[1] + 100, *x.shape[2:]), torch.nan).to(x)
        cache[:, : x.shape[1]] = x
        return cache[:, : x.shape[1]]

    return q, in_longer(k), in_longer(v)


def heads_first(q: Tensor, k: Tensor, v: Tensor) -> Tensors:
    def stored(x: Tensor) -> Tensor:
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    return stored(q), stored(k), stored(v)


def of_one_sequence(q: Tensor, k: Tensor, v: Tensor) -> Tensors:
    return q[:1].expand_as(q), k[:1].expand_as(k), v[:1].expand_as(v)


def of_one_head(q: Tensor, k: Tensor, v: Tensor) -> Tensors:
    return q, k[:, :, :1].expand_as(k), v[:, :, :1].expand_as(v)


def at_odd_addresses(q: Tensor, k: Tensor, v: Tensor) -> Tensors:
    memory = torch.full((k.numel() + 3,), torch.nan).to(k)
    memory[3:] = k.flatten()
    return q, memory[3:].view_as(k), v


LAYOUTS = [packed, in_longer_caches, heads_first, of_one_sequence, of_one_head, at_odd_addresses]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("lay", LAYOUTS, ids=lambda lay: lay.__name__)
def test_any_strides_give_what_contiguous_tensors_give(
    lay: Callable[[Tensor, Tensor, Tensor], Tensors], causal: bool
) -> None:
    q, k, v = (torch.randn(2, 515, 4, 128, device="cuda", dtype=torch.float16) for _ in range(3))
    q, k, v = lay(q, k, v)
    with CudnnEngine("sdpa").active():
        assert explain(q, k, v, causal=causal).backend == "sdpa"
        out, lse = fast_attn_func(q, k, v, causal=causal, return_lse=True)
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        expected, expected_lse = fast_attn_func(q, k, v, causal=causal, return_lse=True, backend="cuda")
    torch.testing.assert_close(out, expected, atol=2e-3, rtol=0)
    torch.testing.assert_close(lse, expected_lse, atol=1e-3, rtol=0)


def test_a_shape_that_is_new_can_be_captured() -> None:
    """cuDNN builds its plan during the capture."""
    q, k, v = (torch.randn(1, 4099, 32, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    assert explain(q, k, v, causal=True).backend == "sdpa"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = fast_attn_func(q, k, v, causal=True)
    q.normal_()
    captured.fill_(torch.nan)
    graph.replay()
    assert torch.equal(captured, fast_attn_func(q, k, v, causal=True))
