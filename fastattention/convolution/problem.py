"""ConvolutionProblem: everything about one call of the causal convolution except its tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

WIDTHS = (2, 3, 4)  # of filters
NO_BACKWARD = (
    "causal_conv1d_update has no backward and an argument requires a gradient; call it under torch.no_grad() or "
    "torch.inference_mode(), or use causal_conv1d"
)


@dataclass(frozen=True, slots=True)
class ConvolutionProblem:
    """A validated call. Hashable, so that the choice of a backend and the plan of a call can be kept.

    Tensors of a backend have these shapes:

        x, out         (batch_size, seqlen, channels)
        weight         (channels, width)
        bias           (channels,)
        states         (num_sequences, channels, state_len): inputs, the newest last; state_len is width - 1, or more in
                       an update
        cu_seqlens     (num_sequences + 1,), int32; then batch_size is 1 and seqlen counts the tokens of all sequences
    """

    updates: bool  # initial_state is written in place, and there is no final_state
    batch_size: int
    seqlen: int
    num_sequences: int
    varlen: bool
    channels: int
    width: int
    state_len: int
    dtype: torch.dtype  # dtype of x and out
    weight_dtype: torch.dtype
    bias_dtype: torch.dtype | None
    state_dtype: torch.dtype  # of states: that of x, or float32 in an update
    device: torch.device
    silu: bool  # whether SiLU follows the convolution
    returns_state: bool
    grads: tuple[str, ...]  # fields of ConvolutionInputs that require a gradient
    in_transform: bool = False  # torch.func or forward-mode differentiation follows the call

    @property
    def axes(self) -> str:
        """The sizes of the call by the names of their axes."""
        return ", ".join(f"{name}={getattr(self, name)}" for name in ("batch_size", "seqlen", "channels", "width"))

    @property
    def out_shape(self) -> tuple[int, int, int]:
        """(batch_size, seqlen, channels)."""
        return self.batch_size, self.seqlen, self.channels

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """(num_sequences, channels, state_len)."""
        return self.num_sequences, self.channels, self.state_len


class ConvolutionInputs(NamedTuple):
    """The tensors of a call. The last axis of x is contiguous; weight and bias are. States have any strides."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None = None
    initial_state: Tensor | None = None  # an update writes it
    cu_seqlens: Tensor | None = None


class UpdateArguments(NamedTuple):
    """The tensors of an update, by the names that its caller knows."""

    x: Tensor
    state: Tensor
    weight: Tensor
    bias: Tensor | None = None

    def inputs(self) -> ConvolutionInputs:
        """The same for backends."""
        return ConvolutionInputs(self.x, self.weight, self.bias, self.state)


class ConvolutionGradients(NamedTuple):
    """The gradients that a backward starts from. Either may be None, but not both. Backends get contiguous ones."""

    out: Tensor | None  # as ConvolutionOutput.out
    final_state: Tensor | None  # as ConvolutionOutput.final_state


class ConvolutionOutput(NamedTuple):
    """The results of a backend; final_state is None unless the problem asks for it."""

    out: Tensor
    final_state: Tensor | None = None
