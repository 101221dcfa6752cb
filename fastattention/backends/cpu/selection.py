"""The cpu backend of the selection: calls of the native library."""

from __future__ import annotations

import ctypes

import torch

from fastattention.attention.selection.backend import SelectionBackend, Serve
from fastattention.attention.selection.problem import SelectionInputs, SelectionOutput, SelectionProblem
from fastattention.backends.common.gradients import why_not_in_transform
from fastattention.backends.common.layout import pointers
from fastattention.backends.common.selection import shared_params, wrong_index
from fastattention.backends.cpu.headers import DTYPE_CODES, STRUCTS, pointer_packer
from fastattention.backends.cpu.library import load_library, why_unavailable
from fastattention.threads import get_num_threads

CpuSelectionParams = STRUCTS["FaSelectionParams"]
_pack = pointer_packer(CpuSelectionParams, *SelectionOutput._fields, *SelectionInputs._fields)


class CpuSelectionBackend(SelectionBackend):
    """One pass over the indices, which also checks them."""

    name = "cpu"

    def why_unavailable(self) -> str | None:
        """Why the native library cannot be loaded, if so."""
        return why_unavailable()

    def why_not(self, problem: SelectionProblem) -> str | None:
        """Refuses other devices, and transforms of functions."""
        if problem.device.type != "cpu":
            return f"tensors are on {problem.device}; the cpu backend takes tensors in host memory"
        return why_not_in_transform("torch") if problem.in_transform else None

    def make_call(self, problem: SelectionProblem, inputs: SelectionInputs) -> Serve:
        """A call of the library whose parameters are set up once."""
        template = CpuSelectionParams.template(
            **shared_params(problem, inputs), dtype=DTYPE_CODES[problem.dtype], total_q=problem.total_q, num_threads=0
        )
        params = CpuSelectionParams.from_buffer_copy(template)
        slots_shape, counts_shape = (problem.num_sets, problem.width), (problem.num_sets,)

        def call(inputs: SelectionInputs) -> SelectionOutput:
            slots = torch.empty(slots_shape, dtype=torch.int32, device="cpu")
            counts = torch.empty(counts_shape, dtype=torch.int32, device="cpu")
            addresses = _pack(*pointers(slots, counts, *inputs))
            wrong = load_library().select_slots(ctypes.addressof(params), addresses, get_num_threads())
            if wrong >= 0:
                raise wrong_index(problem, inputs, wrong)
            return SelectionOutput(slots, counts)

        return call
