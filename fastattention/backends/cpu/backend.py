"""The cpu backend: hands a validated call to the native library."""

from __future__ import annotations

import torch
from torch import Tensor

from fastattention.backends.base import Backend
from fastattention.backends.cpu.library import load_library
from fastattention.backends.cpu.params import attention_params
from fastattention.backends.cpu.prepared import PreparedCall
from fastattention.errors import LibraryError
from fastattention.problem import AttentionOutput, Inputs, Problem
from fastattention.threads import get_num_threads


class CpuBackend(Backend):
    """Native kernels for any CPU, the instruction set chosen at run time."""

    name = "cpu"

    def why_unavailable(self) -> str | None:
        """Why the native library cannot be loaded, if so."""
        try:
            load_library()
        except LibraryError as error:
            return str(error)
        return None

    def why_not(self, problem: Problem) -> str | None:
        """Refuses other devices, gradients and dropout; serves everything else."""
        if problem.device.type != "cpu":
            return f"tensors are on {problem.device}; the cpu backend takes tensors on cpu"
        if problem.needs_grad:
            return "a gradient is needed and this backend has no backward; use backend='sdpa' or torch.no_grad()"
        if problem.dropout_p > 0.0:
            return f"dropout_p={problem.dropout_p} is not served; use dropout_p=0.0 or backend='sdpa'"
        return None

    def describe(self) -> str:
        """Instruction set in use, those to choose from, and threads."""
        library = load_library()
        return f"{library.isa} of {', '.join(library.isas)}; {get_num_threads()} threads"

    def forward(self, problem: Problem, inputs: Inputs) -> AttentionOutput:
        """One call of the native library, appending included."""
        out = torch.empty(problem.out_shape, dtype=problem.dtype, device=problem.device)
        lse = torch.empty(problem.lse_shape, dtype=torch.float32, device=problem.device) if problem.return_lse else None
        load_library().forward(attention_params(problem, inputs, out, lse, get_num_threads()))
        return AttentionOutput(out, lse)

    def prepare(self, problem: Problem, inputs: Inputs, out: Tensor, lse: Tensor, num_threads: int) -> PreparedCall:
        """One call of the native library with a cache, to be run later: lengths and pages are those of now.

        out, lse: contiguous, as `forward` gives them; num_threads: at most, the thread that runs it included
        """
        return PreparedCall(attention_params(problem, inputs, out, lse, num_threads), (inputs, out, lse))
