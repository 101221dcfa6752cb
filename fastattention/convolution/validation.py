"""Checks the arguments of the causal convolution: to a ConvolutionProblem and its inputs, or an ArgumentError."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastattention.convolution.problem import WIDTHS, ConvolutionInputs, ConvolutionProblem
from fastattention.engine.checks import (
    DTYPES,
    TensorSpec,
    check_device,
    check_dtype,
    check_rank,
    check_shape,
    differentiation,
    last_axis_contiguous,
    read_flag,
    spec_of,
)
from fastattention.engine.offsets import check_cu_seqlens
from fastattention.errors import ArgumentError

_ACTIVATIONS = {None: False, "silu": True, "swish": True}


class ConvolutionOptions(NamedTuple):
    """The scalar arguments of a call, of the right types."""

    silu: bool
    returns_state: bool = False


def read_options(activation: object, output_final_state: object = False) -> ConvolutionOptions:
    """ConvolutionOptions from arguments as given; raises ArgumentError for anything else."""
    if not (activation is None or isinstance(activation, str)) or activation not in _ACTIVATIONS:
        raise ArgumentError(f"activation={activation!r} is not known; choose None, 'silu' or 'swish'")
    return ConvolutionOptions(_ACTIVATIONS[activation], read_flag("output_final_state", output_final_state))


def prepare(given: ConvolutionInputs, options: ConvolutionOptions) -> tuple[ConvolutionProblem, ConvolutionInputs]:
    """The problem of a call, and its tensors as backends read them. Raises ArgumentError."""
    x, weight = _check_filters(given)
    num_sequences = x.shape[0]
    if given.cu_seqlens is not None:
        num_sequences = check_cu_seqlens(given.cu_seqlens, x, "x")
    state_len = weight.shape[1] - 1
    if given.initial_state is not None:
        state = spec_of("initial_state", given.initial_state)
        check_shape("initial_state", state, (num_sequences, x.shape[2], state_len), "sequences, channels, width - 1")
        if state.dtype is not x.dtype:
            raise ArgumentError(f"initial_state must have the dtype of x, {x.dtype}, got {state.dtype}")
        check_device("initial_state", state, x, "x")
    return _problem(given, options, num_sequences, state_len, x.dtype, updates=False), as_backends_read(given)


def prepare_update(
    given: ConvolutionInputs, options: ConvolutionOptions
) -> tuple[ConvolutionProblem, ConvolutionInputs]:
    """The same for an update, whose initial_state is the argument `state`."""
    x, weight = _check_filters(given)
    state = spec_of("state", given.initial_state)
    check_rank("state", state, "batch_size, channels, state_len")
    if state.shape[:2] != (x.shape[0], x.shape[2]):
        raise ArgumentError(
            f"state must have the batch_size and channels of x, {(x.shape[0], x.shape[2])}, "
            f"got shape {tuple(state.shape)}"
        )
    needed = weight.shape[1] - 1
    if state.shape[2] < needed:
        raise ArgumentError(f"state_len={state.shape[2]} of state must be at least width - 1 = {needed}")
    if state.dtype not in (x.dtype, torch.float32):
        raise ArgumentError(f"state must have the dtype of x, {x.dtype}, or float32, got {state.dtype}")
    check_device("state", state, x, "x")
    assert given.initial_state is not None
    _check_own_memory("state", given.initial_state)
    problem = _problem(given, options, x.shape[0], state.shape[2], state.dtype, updates=True)
    return problem, as_backends_read(given)


def as_backends_read(given: ConvolutionInputs) -> ConvolutionInputs:
    """The tensors of a call as ConvolutionInputs describes them: those that are so already are not copied."""
    return given._replace(
        x=last_axis_contiguous(given.x),
        weight=given.weight.contiguous(),
        bias=None if given.bias is None else given.bias.contiguous(),
        cu_seqlens=None if given.cu_seqlens is None else given.cu_seqlens.to(torch.int32).contiguous(),
    )


def _check_filters(given: ConvolutionInputs) -> tuple[TensorSpec, TensorSpec]:
    """Checks x, weight and bias; what is known of the first two."""
    x, weight = spec_of("x", given.x), spec_of("weight", given.weight)
    check_dtype(x, "x")
    check_rank("x", x, "batch_size, seqlen, channels")
    channels = x.shape[2]
    if len(weight.shape) == 3 and weight.shape[1] == 1:
        raise ArgumentError(
            f"weight must be (channels, width), got shape {tuple(weight.shape)}; give weight.squeeze(1)"
        )
    check_rank("weight", weight, "channels, width")
    if weight.shape[0] != channels:
        raise ArgumentError(f"weight must have the channels of x, {channels}, got shape {tuple(weight.shape)}")
    if weight.shape[1] not in WIDTHS:
        raise ArgumentError(f"width={weight.shape[1]} is not supported; allowed are {WIDTHS[0]} to {WIDTHS[-1]}")
    parameters = {"weight": weight}
    if given.bias is not None:
        parameters["bias"] = spec_of("bias", given.bias)
        check_shape("bias", parameters["bias"], (channels,), "channels,")
    for name, parameter in parameters.items():
        if parameter.dtype not in DTYPES:
            raise ArgumentError(f"{name} must be float32, float16 or bfloat16, got {parameter.dtype}")
        check_device(name, parameter, x, "x")
    return x, weight


def _check_own_memory(name: str, tensor: Tensor) -> None:
    """Raises when elements of a tensor that is written share memory, or may do so."""
    axes = sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1)
    extent = 1  # elements that the axes so far span
    for stride, size in axes:
        if stride < extent and tensor.numel():
            raise ArgumentError(
                f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}, whose elements share memory; "
                "it is written in place and needs memory of its own"
            )
        extent += (size - 1) * stride


def _problem(
    given: ConvolutionInputs,
    options: ConvolutionOptions,
    num_sequences: int,
    state_len: int,
    state_dtype: torch.dtype,
    updates: bool,
) -> ConvolutionProblem:
    batch_size, seqlen, channels = given.x.shape
    wanted = differentiation(**given._asdict())
    return ConvolutionProblem(
        updates=updates,
        batch_size=batch_size,
        seqlen=seqlen,
        num_sequences=num_sequences,
        varlen=given.cu_seqlens is not None,
        channels=channels,
        width=given.weight.shape[1],
        state_len=state_len,
        dtype=given.x.dtype,
        weight_dtype=given.weight.dtype,
        bias_dtype=None if given.bias is None else given.bias.dtype,
        state_dtype=state_dtype,
        device=given.x.device,
        silu=options.silu,
        returns_state=options.returns_state,
        grads=wanted.grads,
        in_transform=wanted.in_transform,
    )
