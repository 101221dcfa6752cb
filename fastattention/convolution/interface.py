"""The public functions of the causal convolution."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec

from torch import Tensor

from fastattention.convolution.operators import CONVOLUTION, CONVOLUTION_UPDATE
from fastattention.convolution.problem import ConvolutionInputs, ConvolutionOutput, UpdateArguments
from fastattention.convolution.validation import read_options
from fastattention.engine.operator import serves_requests

Arguments = ParamSpec("Arguments")

# Arguments of the package causal-conv1d -> what to give in their place.
_FOREIGN_NAMES = {
    "initial_states": "give initial_state",
    "return_final_states": "give output_final_state",
    "seq_idx": "give cu_seqlens",
    "conv_state": "give state",
    "cache_seqlens": "leave it out: the newest input of a state is its last",
}


def _convolution(read: Callable[Arguments, Any]) -> Callable[Arguments, tuple[Tensor, Tensor | None]]:
    return serves_requests(read, _FOREIGN_NAMES)


def _update(read: Callable[Arguments, Any]) -> Callable[Arguments, Tensor]:
    return serves_requests(read, _FOREIGN_NAMES)


@_convolution
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> Any:
    """A causal convolution of every channel over the last `width` tokens: for prompts and training.

    For every token t and channel, in float32 and rounded once:

        out[t] = act(bias + sum_w weight[w] x[t - width + 1 + w])

    - `x`: (batch_size, seqlen, channels), float32, bfloat16 or float16; copied unless its last axis is contiguous
    - `weight`: (channels, width), width 2 to 4; any of the three dtypes. The last weight multiplies the token itself
    - `bias`: (channels,), any of the three dtypes; None means zeros
    - `activation`: None, or "silu", of which "swish" is another name
    - `initial_state`: (num_sequences, channels, width - 1), the inputs before each sequence, newest last, in the dtype
      of x; None means zeros. It is not written
    - `output_final_state`: whether to return the last width - 1 inputs of each sequence
    - `cu_seqlens`: int32 or int64 (num_sequences + 1,), rising from 0 to seqlen: sequences that follow one another in a
      batch of 1, and do not mix
    - `backend`: "auto", or the name of a backend; `fastattention.explain(..., function=causal_conv1d)` lists them with
      reasons

    Returns (out, final_state): out like x; final_state like initial_state, None unless asked for. Where a sequence is
    shorter than width - 1, older inputs in final_state are those of initial_state. Gradients of x, weight, bias and
    initial_state have the same bits in every run. Raises ArgumentError for wrong arguments, UnsupportedError when the
    backend named cannot serve the call.
    """
    given = ConvolutionInputs(x, weight, bias, initial_state, cu_seqlens)
    return CONVOLUTION, given, read_options(activation, output_final_state), backend, tuple


@_update
def causal_conv1d_update(
    x: Tensor,
    state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    backend: str = "auto",
) -> Any:
    """The same convolution while decoding: `state` holds the newest inputs and is updated in place.

    The arguments that are not listed are those of `causal_conv1d`.

    - `x`: (batch_size, seqlen, channels), the new tokens, usually one
    - `state`: (batch_size, channels, state_len), the inputs before them, newest last; state_len at least width - 1, in
      the dtype of x or float32. It may have any strides, and its elements must not share memory. The call shifts it by
      seqlen and writes the new inputs to its end

    Returns out, like x. It has no gradients. Raises as `causal_conv1d`.
    """
    return CONVOLUTION_UPDATE, UpdateArguments(x, state, weight, bias), read_options(activation), backend, _out


def _out(result: ConvolutionOutput) -> Tensor:
    return result.out
