"""What our kernels of the causal convolution do not serve, on any device, and the strides of its states."""

from __future__ import annotations

from fastattention.backends.common.gradients import why_not_in_transform
from fastattention.backends.common.layout import contiguous_strides, first_strides
from fastattention.convolution.problem import NO_BACKWARD, ConvolutionInputs, ConvolutionProblem


def why_not_gradients(problem: ConvolutionProblem) -> str | None:
    """Why no backend differentiates `problem`; None where one can."""
    if problem.updates and (problem.grads or problem.in_transform):
        return NO_BACKWARD
    return None


def why_not_kernels(problem: ConvolutionProblem) -> str | None:
    """Why kernels of ours cannot serve `problem`; None where they can."""
    reason = why_not_gradients(problem)
    if reason is None and problem.in_transform:
        reason = why_not_in_transform("torch")
    return reason


def state_strides(problem: ConvolutionProblem, inputs: ConvolutionInputs) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(sequence, channel, input) strides of the state that a call reads, and of that which it writes."""
    initial = first_strides(inputs.initial_state)
    return initial, initial if problem.updates else contiguous_strides(problem.state_shape)
