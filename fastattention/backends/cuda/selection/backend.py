"""The cuda backend of the selection: one launch of kernels/select_slots.cuh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from fastattention import environment
from fastattention.attention.selection.backend import SelectionBackend, Serve
from fastattention.attention.selection.problem import SelectionInputs, SelectionOutput, SelectionProblem
from fastattention.backends.common.c_struct import Params, params_of
from fastattention.backends.common.gradients import why_not_in_transform
from fastattention.backends.common.layout import pointers
from fastattention.backends.common.selection import check_indices, limits_of, no_slots, shared_params
from fastattention.backends.cuda.common.arch import COMMON_FOLDERS
from fastattention.backends.cuda.common.numbers import divisor
from fastattention.gpu_runtime import device
from fastattention.gpu_runtime.module import KernelLaunch
from fastattention.gpu_runtime.variant import Entry, Variant

_KERNELS = Path(__file__).parent / "kernels"
_MOST = 2**31 - 1  # CTAs of a launch, and what kernels count keys and tokens in
SelectionParams = params_of(_KERNELS / "selection_params.h", "SelectionParams")
_make_params = SelectionParams.maker(*SelectionOutput._fields, *SelectionInputs._fields)


@dataclass(frozen=True)
class SelectionConfig(Variant):
    """One variant of kernels/select_slots.cuh."""

    source: ClassVar[str] = "select_slots.cuh"
    include_folders: ClassVar = (_KERNELS, *COMMON_FOLDERS)
    num_warps: ClassVar = 8

    wide_indices: bool  # int64

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Its one function. Warps tell one another their counts."""
        return (Entry("fastattention_select_slots", self.num_warps, 4 * self.num_warps),)


class CudaSelectionBackend(SelectionBackend):
    """A kernel for GPUs from Pascal on."""

    name = "cuda"

    def why_unavailable(self) -> str | None:
        """Why no kernel can run here."""
        return device.why_unavailable()

    def why_not(self, problem: SelectionProblem) -> str | None:
        """Refuses transforms of functions, and calls that are too large for one launch."""
        if (reason := self._why_not_device(problem)) is not None:
            return reason
        if problem.in_transform:
            return why_not_in_transform("torch")
        if max(problem.num_sets, problem.width, problem.most_keys) > _MOST:
            return f"{problem.num_sets} sets of {problem.width} keys among {problem.most_keys} are more than {_MOST}"
        return None

    def make_call(self, problem: SelectionProblem, inputs: SelectionInputs) -> Serve:
        """One launch, if there are queries and sequences. Indices are checked where values on a GPU are."""
        if problem.num_sets == 0 or problem.batch_size == 0:
            return lambda inputs: no_slots(problem, inputs)
        launch = KernelLaunch(SelectionConfig(problem.dtype is torch.int64), 0, problem.num_sets)
        enqueue = self._launcher(launch, problem)
        template = SelectionParams.template(
            **shared_params(problem, inputs),
            **divisor("page", problem.k_seqlen),
            **divisor("key_block", problem.key_block),
            width=problem.width,
            most_keys=problem.most_keys,
        )

        def call(inputs: SelectionInputs) -> SelectionOutput:
            if environment.check_numbers():
                check_indices(problem, inputs, limits_of(problem, inputs))
            slots = inputs.indices.new_empty((problem.num_sets, problem.width), dtype=torch.int32)
            counts = inputs.indices.new_empty(problem.num_sets, dtype=torch.int32)
            enqueue(_make_params(template, *pointers(slots, counts, *inputs)))
            return SelectionOutput(slots, counts)

        return call

    # The emulator of the tests replaces these methods.

    def _why_not_device(self, problem: SelectionProblem) -> str | None:
        return device.why_not(problem.device)

    def _launcher(self, launch: KernelLaunch, problem: SelectionProblem) -> Callable[[Params], None]:
        return device.launcher(launch, problem.device)
