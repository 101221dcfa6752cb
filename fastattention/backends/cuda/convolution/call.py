"""The launches of a causal convolution, for tensors of some shapes and strides: parameters, memory, calls."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fastattention.backends.common.c_struct import Params
from fastattention.backends.common.convolution import state_strides
from fastattention.backends.common.layout import contiguous_strides, named_strides, pointers
from fastattention.backends.cuda.common.dtype_codes import DTYPE_CODES
from fastattention.backends.cuda.convolution.config import ConvolutionBackwardConfig, ConvolutionConfig
from fastattention.backends.cuda.convolution.heuristics import Division, divide
from fastattention.backends.cuda.convolution.params import ConvolutionBackwardParams, ConvolutionParams
from fastattention.convolution.problem import (
    ConvolutionGradients,
    ConvolutionInputs,
    ConvolutionOutput,
    ConvolutionProblem,
)
from fastattention.gpu_runtime.chips import Limits
from fastattention.gpu_runtime.module import KernelLaunch

_make_params = ConvolutionParams.maker(*ConvolutionInputs._fields, "out", "final_state")
Launcher = Callable[[Params], None]


class ConvolutionCall:
    """Serves calls with the strides of `inputs`. Any number of threads may call it at a time."""

    def __init__(
        self,
        problem: ConvolutionProblem,
        inputs: ConvolutionInputs,
        limits: Limits,
        launcher: Callable[[KernelLaunch], Launcher],
    ) -> None:
        """launcher: gives a function that enqueues a kernel."""
        division = divide(problem, limits.num_sms)
        launch = KernelLaunch(ConvolutionConfig(problem.dtype, problem.width, division.num_warps), 0, division.num_ctas)
        self._launch = launcher(launch) if launch.num_ctas else None
        self._template = convolution_template(problem, inputs, division)
        self._updates = problem.updates
        self._out = problem.out_shape, contiguous_strides(problem.out_shape)
        self._state = (problem.state_shape, contiguous_strides(problem.state_shape)) if problem.returns_state else None

    def __call__(self, inputs: ConvolutionInputs) -> ConvolutionOutput:
        """One launch. An update writes the state where it is."""
        addresses = pointers(*inputs)  # which may raise: before anything is allocated
        out = inputs.x.new_empty_strided(*self._out)
        state = None if self._state is None else out.new_empty_strided(*self._state)
        if self._launch is not None:
            written = inputs.initial_state if self._updates else state
            results = out.data_ptr(), 0 if written is None else written.data_ptr()
            self._launch(_make_params(self._template, *addresses, *results))
        return ConvolutionOutput(out, state)


def differentiate(
    problem: ConvolutionProblem,
    inputs: ConvolutionInputs,
    grads: ConvolutionGradients,
    limits: Limits,
    launcher: Callable[[KernelLaunch], Launcher],
) -> dict[str, Tensor]:
    """The gradient of every tensor in `problem.grads`: one launch, and one more that adds up those of the filters."""
    division = divide(problem, limits.num_sms)
    # Without a sequence no kernel writes, and gradients of the filters are zero.
    new = torch.empty_like if division.num_ctas else torch.zeros_like
    found = {name: new(getattr(inputs, name), memory_format=torch.contiguous_format) for name in problem.grads}
    if not division.num_ctas:
        return found
    config = ConvolutionBackwardConfig(problem.dtype, problem.width, division.num_warps)
    sums_shape = division.num_ranges, problem.width + 1, problem.channels
    sums = torch.empty(sums_shape, dtype=torch.float32, device=problem.device)
    template = ConvolutionBackwardParams.template(
        call=convolution_template(problem, inputs, division), num_ranges=division.num_ranges
    )
    tensors = {"grad_out": grads.out, "grad_final_state": grads.final_state, "sums": sums}
    tensors |= {f"grad_{name}": grad for name, grad in found.items()}
    params = ConvolutionBackwardParams.make(template, **_addresses(tensors))
    for name, address in _addresses(inputs._asdict()).items():
        setattr(params.call, name, address)
    launcher(KernelLaunch(config, 0, division.num_ctas))(params)
    if "weight" in found or "bias" in found:
        threads = 32 * config.num_warps
        launcher(KernelLaunch(config, 1, -(-(problem.width + 1) * problem.channels // threads)))(params)
    return found


def _addresses(tensors: dict[str, Tensor | None]) -> dict[str, int]:
    return dict(zip(tensors, pointers(*tensors.values()), strict=True))


def convolution_template(problem: ConvolutionProblem, inputs: ConvolutionInputs, division: Division) -> bytes:
    """All parameters but addresses."""
    initial, final = state_strides(problem, inputs)
    return ConvolutionParams.template(
        **named_strides("x", inputs.x.stride()[:2], "batch token"),
        **named_strides("initial", initial, "sequence channel input"),
        **named_strides("final", final, "sequence channel input"),
        seqlen=problem.seqlen,
        num_sequences=problem.num_sequences,
        channels=problem.channels,
        state_len=problem.state_len,
        channel_tiles=division.channel_tiles,
        range_tokens=division.range_tokens,
        ranges_of_row=division.ranges_of_row,
        weight_dtype=DTYPE_CODES[problem.weight_dtype],
        bias_dtype=DTYPE_CODES[problem.bias_dtype or torch.float32],
        state_dtype=DTYPE_CODES[problem.state_dtype],
        silu=problem.silu,
    )
