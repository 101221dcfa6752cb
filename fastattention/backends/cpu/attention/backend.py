"""The cpu backend: hands a validated call to the native library."""

from __future__ import annotations

from torch import Tensor

from fastattention.attention.backend import INT8_PRODUCTS, AttentionBackend
from fastattention.attention.problem import AttentionOutput, Inputs, OutputGradients, Problem
from fastattention.backends.common.arguments import KERNELS_SERVE, why_not_arguments
from fastattention.backends.common.gradients import why_not_backward
from fastattention.backends.common.layout import Strides, strides_of
from fastattention.backends.cpu.attention.call import CpuAttentionCall
from fastattention.backends.cpu.library import load_library, why_unavailable
from fastattention.engine.bounded import BoundedDict
from fastattention.threads import get_num_threads


class CpuBackend(AttentionBackend):
    """Native kernels for any CPU, the instruction set chosen at run time."""

    name = "cpu"
    has_backward = True

    def __init__(self) -> None:
        self._calls: BoundedDict[tuple[Problem, Strides], CpuAttentionCall] = BoundedDict()

    def why_unavailable(self) -> str | None:
        """Why the native library cannot be loaded, if so."""
        return why_unavailable()

    def why_not(self, problem: Problem) -> str | None:
        """Refuses other devices, returned dropout masks, and gradients of slopes, biases and caches."""
        if problem.device.type != "cpu":
            return f"tensors are on {problem.device}; the cpu backend takes tensors on cpu"
        if (reason := why_not_backward(problem, self.name)) is not None:
            return reason
        if problem.qk_dtype is not None and not load_library().multiplies_int8:
            return (
                "qk_dtype needs AVX-VNNI, AVX-512 VNNI, AMX int8 or dot products of Arm, which the instruction set in "
                f"use, {load_library().isa}, does not have on this processor; leave qk_dtype out"
            )
        if (reason := why_not_arguments(problem, self.name, KERNELS_SERVE)) is not None:
            return reason
        if problem.cache_dtype is not None and (problem.block_size or problem.dropout_p or problem.qk_dtype):
            given = {"block_mask": problem.block_size, "dropout_p": problem.dropout_p, "qk_dtype": problem.qk_dtype}
            names = " and ".join(name for name, value in given.items() if value)
            return f"{names} with quantized pages is not served; dequantize k and v, or use backend='sdpa'"
        if problem.return_mask:
            return "return_attn_probs with dropout is not served; use backend='sdpa', whose mask is the same"
        return None

    def how(self, problem: Problem) -> str:
        """Whether it computes the gradients too, and whether the result is approximate."""
        if problem.qk_dtype is not None:
            return INT8_PRODUCTS
        return "kernels of its own, forward and backward" if problem.grads else ""

    def describe(self) -> str:
        """The instruction set in use, the available ones, and the number of threads."""
        library = load_library()
        return f"{library.isa} of {', '.join(library.isas)}; {get_num_threads()} threads"

    def make_call(self, problem: Problem, inputs: Inputs) -> CpuAttentionCall:
        """One call of the native library, appending included."""
        key = problem, strides_of(inputs)
        call = self._calls.get(key)
        if call is None:
            call = self._calls[key] = CpuAttentionCall(problem, inputs)
        return call

    def forward(self, problem: Problem, inputs: Inputs) -> AttentionOutput:
        """Makes the call and runs it."""
        return self.make_call(problem, inputs)(inputs)

    def backward(
        self, problem: Problem, inputs: Inputs, result: AttentionOutput, grads: OutputGradients
    ) -> dict[str, Tensor]:
        """One call of the native library. The results have the same bits with any number of threads."""
        return self.make_call(problem, inputs).backward(problem, inputs, result, grads)
