"""Chunked linear attention by the CUDA kernels on tensors of the processor: calls and their gradients."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping

import emulator
from emulator import Range, Report
from torch import Tensor

from fastattention.backends.common.c_struct import Params
from fastattention.backends.cuda.linear.chunk_call import ChunkedCall
from fastattention.backends.cuda.linear.chunk_config import ChunkVariant
from fastattention.backends.cuda.linear.chunk_heuristics import choose_gradient_kernels
from fastattention.backends.cuda.linear.gradient_call import ChunkedGradients
from fastattention.backends.cuda.linear.params import ChunkParams, GradientParams
from fastattention.gpu_runtime.chips import Limits
from fastattention.gpu_runtime.module import KernelLaunch
from fastattention.linear.problem import LinearGradients, LinearInputs, LinearOutput, LinearProblem
from fastattention.testing.memory import nan_in_fresh_memory

LIMITS = {backend.name: backend.limits for backend in emulator.EMULATED}


class EmulatedChunks:
    """The kernels as if on one chip."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.reports: list[Report] = []

    def run(self, problem: LinearProblem, inputs: LinearInputs) -> LinearOutput:
        self.reports.clear()
        with nan_in_fresh_memory():
            return ChunkedCall(problem, self.limits.arch, self.limits, self._launcher)(inputs)

    def gradients(self, problem: LinearProblem, inputs: LinearInputs, grads: LinearGradients) -> Mapping[str, Tensor]:
        """Gradients of the tensors in problem.grads."""
        self.reports.clear()
        kernels = choose_gradient_kernels(problem, self.limits.arch, self.limits)
        assert kernels is not None, "no kernels fit the chip"
        with nan_in_fresh_memory():
            return ChunkedGradients(problem, self.limits.arch, kernels, self._launcher)(inputs, grads)

    def _launcher(self, launch: KernelLaunch) -> Callable[[Params], None]:
        return lambda params: self.reports.append(emulator.launch(launch, params, ranges_of(launch, params)))


def sliced(tensor: Tensor) -> Tensor:
    """The same values at odd addresses, in rows of an odd length."""
    wide = tensor.new_zeros(*tensor.shape[:-1], tensor.shape[-1] + 3)
    wide[..., 1:-2] = tensor
    return wide[..., 1:-2]


def ranges_of(launch: KernelLaunch, params: Params) -> list[Range]:
    """The memory that a kernel may access in vectors."""
    config = launch.variant
    assert isinstance(config, ChunkVariant)
    if isinstance(params, ChunkParams):
        return _ranges_of_call(config, params)
    assert isinstance(params, GradientParams)
    call = params.call
    slots, tokens = call.num_slots * call.nheads, _num_tokens(call)
    sizes = {
        "state_gradients": slots * call.columns_v * config.headdim * 2,
        "update_gradients": slots * call.columns_v * config.chunk * 2 * config.delta_rule,
        "dq": tokens * call.nheads * call.columns_k * (4 if params.sums_heads else 2),
        "dk": tokens * call.nheads * call.columns_k * (4 if params.sums_heads else 2),
        "dv": tokens * call.nheads * call.columns_v * 2,
    }
    return _ranges_of_call(config, call) + [Range(getattr(params, name), size) for name, size in sizes.items() if size]


def _num_tokens(params: Params) -> int:
    offsets = _int32s(params.cu_seqlens, params.num_sequences + 1)
    return offsets[-1] if offsets else params.num_sequences * params.seqlen


def _ranges_of_call(config: ChunkVariant, params: Params) -> list[Range]:
    chunk, headdim = config.chunk, config.headdim
    delta, key = config.delta_rule, config.gate_per_key
    slots = params.num_slots * params.nheads
    rows = params.num_sequences if not params.cu_seqlens else 1
    tokens = _num_tokens(params) // max(rows, 1)
    square, scaled = slots * chunk * chunk * 2, slots * chunk * headdim * 2 * key
    results = rows * tokens * params.nheads * params.columns_v * 2
    sizes = {
        "scores": square,
        "inverse": square * delta,
        "turned_inverse": square * delta,
        "factors": slots * 4 * (headdim + chunk * delta if key else 4 * chunk + 4),
        "q_scaled": scaled,
        "k_scaled": scaled * (1 + delta),
        "states": slots * params.columns_v * headdim * 2,
        "updates": slots * params.columns_v * chunk * 2 * delta,
        "out": results,
        "dout": results,
    }
    ranges = [Range(getattr(params, name) or 0, size) for name, size in sizes.items() if size]
    heads_k = params.nheads // params.group_size
    for name, heads, columns, item in (
        ("q", heads_k, params.columns_k, 2),
        ("k", heads_k, params.columns_k, 2),
        ("v", params.nheads, params.columns_v, 2),
        ("g", params.nheads, params.columns_k * key, 2 if params.gate_format else 4),
    ):
        if rows * tokens * columns:
            strides = [getattr(params, f"{name}_stride_{axis}") for axis in ("batch", "row", "head")]
            last = sum((size - 1) * stride for size, stride in zip((rows, tokens, heads), strides, strict=True))
            ranges.append(Range(getattr(params, name), (last + columns) * item))
    return [one for one in ranges if one.address]


def _int32s(address: int | None, count: int) -> list[int]:
    return list((ctypes.c_int32 * count).from_address(address)) if address else []
