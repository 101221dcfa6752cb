"""The cuda backend of the indexer: what it serves, and by which kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from fastattention import environment
from fastattention.backends.common.c_struct import Params
from fastattention.backends.common.gradients import why_not_in_transform
from fastattention.backends.cuda.indexer.call import IndexerCall
from fastattention.backends.cuda.indexer.config import HEADDIMS, MOST_HEADS
from fastattention.gpu_runtime import device, module
from fastattention.gpu_runtime.chips import Limits
from fastattention.gpu_runtime.module import KernelLaunch
from fastattention.indexer.backend import IndexerBackend, Serve
from fastattention.indexer.problem import IndexerInputs, IndexerProblem


class CudaIndexerBackend(IndexerBackend):
    """Our kernels for GPUs from Pascal on. Products of 16 bits are added up in float32."""

    name = "cuda"

    def why_unavailable(self) -> str | None:
        """Why no kernel can run here."""
        return device.why_unavailable()

    def why_not(self, problem: IndexerProblem) -> str | None:
        """Refuses float32, wide heads, more heads than a warp has registers for, and transforms of functions."""
        if (reason := self._why_not_device(problem)) is not None:
            return reason
        if problem.in_transform:
            return why_not_in_transform("torch")
        if problem.dtype is torch.float32:
            return "float32 is not served; use float16, bfloat16 or backend='torch'"
        if not 1 <= problem.headdim <= HEADDIMS[-1]:
            return f"headdim={problem.headdim} is not served; use 1 to {HEADDIMS[-1]}, or backend='torch'"
        if not 1 <= problem.nheads <= MOST_HEADS:
            return f"nheads={problem.nheads} is not served; use 1 to {MOST_HEADS}, or backend='torch'"
        return None

    def make_call(self, problem: IndexerProblem, inputs: IndexerInputs) -> Serve:
        """Two launches: scores, and the best keys."""
        limits = self._limits(problem)
        arch = environment.cuda_arch() or limits.arch
        return IndexerCall(problem, arch, limits, functools.partial(self._launcher, problem=problem))

    # The emulator of the tests replaces these methods.

    def _why_not_device(self, problem: IndexerProblem) -> str | None:
        return device.why_not(problem.device)

    def _limits(self, problem: IndexerProblem) -> Limits:
        return module.device_limits(device.index_of(problem.device))

    def _launcher(self, launch: KernelLaunch, problem: IndexerProblem) -> Callable[[Params], None]:
        return device.launcher(launch, problem.device)
