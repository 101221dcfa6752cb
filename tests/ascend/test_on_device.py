"""The list of cases on hardware: on an NPU as users have it, and on a GPU through upstream Triton.

Skipped where there is neither. A GPU shows that the kernels' logic is right on real hardware, and not what
Triton-Ascend makes of the same source. On an NPU both implementations run: our kernels and the operators of torch_npu.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch
from ascend_on_cuda import UpstreamTritonBackend
from conformance.cases import CASES
from conformance.check import check
from conformance.engines import RegisteredEngine
from torch import Tensor

from ascend.vendor.gradient_cases import check_gradients, gradient_runs
from fastattention.attention.problem import Problem
from fastattention.backends.ascend.backend import AscendBackend
from fastattention.testing.calls import Call
from fastattention.testing.case import Case
from fastattention.testing.devices import copied_back, moved


class OnDevice(RegisteredEngine):
    """A backend on calls that are moved to a device; `isa` is the value of FASTATTENTION_ASCEND meanwhile."""

    @property
    def device(self) -> str:
        return "cuda" if self.backend == UpstreamTritonBackend.name else "npu"

    @property
    def registered(self) -> dict[str, str]:
        return {UpstreamTritonBackend.name: "ascend_on_cuda:UpstreamTritonBackend"}

    @contextmanager
    def active(self) -> Iterator[None]:
        with mock.patch.dict(os.environ, FASTATTENTION_ASCEND=self.isa or ""), super().active():
            yield

    def refusal(self, problem: Problem) -> str | None:
        return super().refusal(replace(problem, device=torch.device(self.device, 0)))

    def run(self, call: Call) -> tuple[Tensor, Tensor]:
        on_device = moved(call, self.device)
        out, lse = on_device.run(self.backend)
        copied_back(call, on_device)
        return out.cpu(), lse.cpu()

    def out_differentiably(self, call: Call) -> Tensor:
        """`run_without_lse` so that gradients come back to the tensors of the call."""
        copies = {name: x.to(self.device) if isinstance(x, Tensor) else x for name, x in call.arguments.items()}
        return replace(call, arguments=copies).run_without_lse(self.backend).cpu()

    def run_without_lse(self, call: Call) -> Tensor:
        return moved(call, self.device).run_without_lse(self.backend).cpu()


REASONS = {"cuda": UpstreamTritonBackend().why_unavailable(), "npu": AscendBackend().why_unavailable()}
ENGINES = [
    pytest.param(engine, id=engine.name, marks=pytest.mark.skipif(reason is not None, reason=str(reason)))
    for engine in (OnDevice(UpstreamTritonBackend.name), OnDevice("ascend", "triton"), OnDevice("ascend", "vendor"))
    for reason in [REASONS[engine.device]]
]
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
# One skipped test says as much as a thousand.
LIST = CASES if None in REASONS.values() else CASES[:1]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.parametrize("case", LIST, ids=[case.name for case in LIST])
def test_is_right_repeats_and_writes_nothing_else(engine: OnDevice, case: Case, dtype: torch.dtype) -> None:
    check(engine, case, dtype)


VENDOR = [param for param in ENGINES if param.id == OnDevice("ascend", "vendor").name]
GRADIENTS = list(itertools.islice(gradient_runs(*DTYPES.values()), None if REASONS["npu"] is None else 1))


@pytest.mark.parametrize("engine", VENDOR)
@pytest.mark.parametrize(
    ("case", "dtype"), GRADIENTS, ids=[f"{case.name}-{str(dtype).removeprefix('torch.')}" for case, dtype in GRADIENTS]
)
def test_gradients_of_torch_npu_are_right(engine: OnDevice, case: Case, dtype: torch.dtype) -> None:
    with engine.active():
        check_gradients(case, dtype, engine.out_differentiably)
