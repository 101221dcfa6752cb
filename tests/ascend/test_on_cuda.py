"""The list of cases on the Triton kernels, compiled by upstream Triton for the GPU of this machine.

Skipped where there is no GPU. It shows on real hardware that their logic is right. What it cannot show is what
Triton-Ascend makes of the same source.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch
from ascend_on_cuda import UpstreamTritonBackend
from conformance.calls import Call
from conformance.case import Case
from conformance.cases import CASES
from conformance.check import check
from conformance.devices import copied_back, moved
from conformance.engines import Engine, forget_backends
from torch import Tensor

from fastattention.backends import registry
from fastattention.problem import Problem

pytestmark = pytest.mark.skipif(
    UpstreamTritonBackend().why_unavailable() is not None, reason="needs a GPU and upstream Triton"
)


class UpstreamEngine(Engine):
    """UpstreamTritonBackend, registered while it is active."""

    @contextmanager
    def active(self) -> Iterator[None]:
        with mock.patch.dict(registry.ORDER, {self.backend: "ascend_on_cuda:UpstreamTritonBackend"}):
            forget_backends()
            yield
        forget_backends()

    def refusal(self, problem: Problem) -> str | None:
        return UpstreamTritonBackend().why_not(replace(problem, device=torch.device("cuda:0")))

    def run(self, call: Call) -> tuple[Tensor, Tensor]:
        on_gpu = moved(call, "cuda")
        out, lse = on_gpu.run(self.backend)
        copied_back(call, on_gpu)
        return out.cpu(), lse.cpu()

    def run_without_lse(self, call: Call) -> Tensor:
        return moved(call, "cuda").run_without_lse(self.backend).cpu()


DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_is_right_repeats_and_writes_nothing_else(case: Case, dtype: torch.dtype) -> None:
    check(UpstreamEngine(UpstreamTritonBackend.name), case, dtype)
