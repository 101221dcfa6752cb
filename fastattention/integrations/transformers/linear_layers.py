"""What replaces functions of Transformers' linear layers: the same arguments and results, by our functions.

Each Replacement has a function that says why a call cannot be served, and one that serves it. Both take the arguments
that models give. Arguments of other implementations, which functions of torch ignore too, are ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from transformers.utils import logging

from fastattention.convolution import causal_conv1d, causal_conv1d_update
from fastattention.convolution.problem import WIDTHS
from fastattention.engine.checks import DTYPES, needs_grad
from fastattention.linear import (
    chunk_gated_delta_rule,
    chunk_kda,
    chunk_ssd,
    recurrent_gated_delta_rule,
    recurrent_kda,
    recurrent_ssd,
)
from fastattention.linear.validation import MAX_HEADDIM

_log = logging.get_logger(__name__)


class Replacement(NamedTuple):
    """What replaces a function of models."""

    kind: str  # what the function computes, for messages
    why_not: Callable[..., str | None]  # why a call cannot be served
    serve: Callable[..., Any]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def warn_once(message: str) -> None:
    """Warns once for each message, also while torch.compile traces."""
    _log.warning_once(message)


# ---- delta rules


def _why_not_delta(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *_: object,
    **kwargs: Any,
) -> str | None:
    reason = _why_not_dtypes(query=query, g=g, beta=beta) or _why_not_offsets(kwargs)
    if reason is not None:
        return reason
    if not query.dtype is key.dtype is value.dtype:
        return f"query, key and value are {query.dtype}, {key.dtype} and {value.dtype}; they must have one dtype"
    return _why_not_headdim(query.shape[-1], value.shape[-1])


def _delta_in_chunks(function: Callable[[], Any]) -> Callable[..., Any]:
    """Backends choose their chunks themselves. function: gives the function of fastattention.linear, at each call."""

    def serve(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        chunk_size: int = 64,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        return _serve_delta(function(), query, key, value, g, beta, *args, **kwargs)

    return serve


def _delta_by_token(function: Callable[[], Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: _serve_delta(function(), *args, **kwargs)


def _serve_delta(
    function: Callable[..., tuple[Tensor, Tensor | None]],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """(out, final state), the state in float32 as models keep it."""
    if initial_state is not None:
        initial_state = initial_state.to(value.device, torch.float32)
    return function(
        query,
        key,
        value,
        g,
        beta,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=_offsets(kwargs),
    )


# ---- Mamba-2


def _why_not_ssd(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803, as models call it
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    *_: object,
    z: Tensor | None = None,
    **kwargs: Any,
) -> str | None:
    if z is not None:
        return "a prompt is given with z, which the functions of torch ignore"
    reason = _why_not_offsets(kwargs)
    return reason or _why_not_ssd_tensors(hidden_states, dt, A, B, C)


def _why_not_ssd_tensors(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> str | None:
    if (reason := _why_not_dtypes(hidden_states=x, dt=dt, A=a)) is not None:
        return reason
    if not x.dtype is b.dtype is c.dtype:
        return f"hidden_states, B and C are {x.dtype}, {b.dtype} and {c.dtype}; they must have one dtype"
    return _why_not_headdim(x.shape[-1], b.shape[-1])


def _ssd_in_chunks(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    chunk_size: int,
    D: Tensor | None = None,  # noqa: N803
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    return_final_states: bool = False,
    **kwargs: Any,
) -> Any:
    """(batch_size, seqlen, nheads, headdim), and the final state (.., headdim, dstate) if it is asked for.

    The memory of states has headdim last, as our kernels read them. Caches of Transformers keep that.
    """
    if initial_states is not None:
        initial_states = initial_states.to(hidden_states.device, torch.float32).mT
    out, state = chunk_ssd(
        hidden_states,
        dt,
        A,
        B,
        C,
        D,
        dt_bias=dt_bias,
        dt_softplus=dt_softplus,
        dt_limit=dt_limit,
        initial_state=initial_states,
        output_final_state=return_final_states,
        state_v_first=False,
        cu_seqlens=_offsets(kwargs),
    )
    if not return_final_states:
        return out
    assert state is not None
    return out, state.mT


def _why_not_ssd_token(
    state: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    D: Tensor | None = None,  # noqa: N803
    dt_bias: Tensor | None = None,
    *_: object,
    **__: object,
) -> str | None:
    for name, tensor, axes in (("dt", dt, 1), ("A", A, 2), ("D", D, 1), ("dt_bias", dt_bias, 1)):
        if tensor is not None and any(tensor.stride(-axis) and tensor.shape[-axis] > 1 for axis in range(1, axes + 1)):
            return f"{name} differs within a head"
    return _why_not_ssd_tensors(hidden_states, dt, A, B, C)


def _ssd_by_token(
    state: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    D: Tensor | None = None,  # noqa: N803
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    z: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """(batch_size, nheads, headdim) of one token for each row of the batch. `state` is written in place."""
    out, new_state = recurrent_ssd(
        hidden_states.unsqueeze(1),
        dt[..., 0].unsqueeze(1),
        A[:, 0, 0],
        B.unsqueeze(1),
        C.unsqueeze(1),
        None if D is None else D[:, 0],
        dt_bias=None if dt_bias is None else dt_bias[:, 0],
        dt_softplus=dt_softplus,
        dt_limit=(-math.inf, math.inf),
        initial_state=state.to(torch.float32).mT,
        output_final_state=True,
        state_v_first=False,
    )
    assert new_state is not None
    state.copy_(new_state.mT)
    out = out.squeeze(1)
    return out if z is None else out * functional.silu(z)


# ---- the convolution in front of all of them


def _why_not_convolution(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> str | None:
    return _why_not_filters(hidden_states, weight, activation) or _why_not_offsets(kwargs)


def _convolve(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> Tensor:
    """(batch_size, channels, seqlen), as models keep it. Sequences that follow one another are kept apart."""
    out, _ = causal_conv1d(
        hidden_states.transpose(1, 2),
        weight,
        bias,
        activation=activation,
        cu_seqlens=_offsets(kwargs),
    )
    return out.transpose(1, 2)


def _why_not_convolution_update(
    hidden_states: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> str | None:
    if conv_state.dtype not in (hidden_states.dtype, torch.float32):
        return f"conv_state is {conv_state.dtype}, and hidden_states {hidden_states.dtype}"
    if needs_grad(hidden_states, conv_state, weight, bias):
        return "a token is decoded with gradients"
    return _why_not_filters(hidden_states, weight, activation)


def _convolve_update(
    hidden_states: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """(batch_size, channels, seqlen) of new tokens. `conv_state` is written in place."""
    out = causal_conv1d_update(hidden_states.transpose(1, 2), conv_state, weight, bias, activation=activation)
    return out.transpose(1, 2)


def _why_not_filters(hidden_states: Tensor, weight: Tensor, activation: str | None) -> str | None:
    if (reason := _why_not_dtypes(hidden_states=hidden_states, weight=weight)) is not None:
        return reason
    if weight.shape[-1] not in WIDTHS:
        return f"a filter has {weight.shape[-1]} weights; allowed are {WIDTHS[0]} to {WIDTHS[-1]}"
    if activation not in (None, "silu", "swish"):
        return f"activation={activation!r}; allowed are None, 'silu' and 'swish'"
    return None


# ---- what they share


def _given_offsets(kwargs: dict[str, Any]) -> Tensor | None:
    """Offsets of sequences that follow one another in one row, under either name that models have for them."""
    cu_seqlens: Tensor | None = kwargs.get("cu_seqlens")
    return kwargs.get("cu_seq_lens_q") if cu_seqlens is None else cu_seqlens


def _offsets(kwargs: dict[str, Any]) -> Tensor | None:
    """These offsets, or those of seq_idx, which says for each token of a row to which sequence it belongs."""
    cu_seqlens, seq_idx = _given_offsets(kwargs), kwargs.get("seq_idx")
    if cu_seqlens is not None or seq_idx is None:
        return cu_seqlens
    row = seq_idx[0]
    (begins,) = torch.where(row[1:] != row[:-1])
    ends = torch.tensor([0, row.shape[0]], device=row.device, dtype=begins.dtype)
    return torch.cat([ends[:1], begins + 1, ends[1:]])


def _why_not_offsets(kwargs: dict[str, Any]) -> str | None:
    seq_idx = kwargs.get("seq_idx")
    if _given_offsets(kwargs) is not None or seq_idx is None:
        return None
    if seq_idx.shape[0] != 1:
        return f"seq_idx has {seq_idx.shape[0]} rows; concatenate all sequences in one"
    if torch.compiler.is_compiling():
        return "seq_idx is given without cu_seq_lens_q under torch.compile"
    return None


def _why_not_dtypes(**tensors: Tensor) -> str | None:
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            return f"{name} is {tensor.dtype}; allowed are float32, float16 and bfloat16"
    return None


def _why_not_headdim(*sizes: int) -> str | None:
    if max(sizes) > MAX_HEADDIM:
        return f"a head dimension is {max(sizes)}; allowed are 1 to {MAX_HEADDIM}"
    return None


def _delta(serve: Callable[..., Any]) -> Replacement:
    return Replacement("a gated delta rule", _why_not_delta, serve)


_chunks, _kda_chunks = (
    _delta(_delta_in_chunks(lambda: chunk_gated_delta_rule)),
    _delta(_delta_in_chunks(lambda: chunk_kda)),
)
_tokens, _kda_tokens = (
    _delta(_delta_by_token(lambda: recurrent_gated_delta_rule)),
    _delta(_delta_by_token(lambda: recurrent_kda)),
)
_ssd_chunks = Replacement("Mamba-2", _why_not_ssd, _ssd_in_chunks)
_ssd_tokens = Replacement("Mamba-2", _why_not_ssd_token, _ssd_by_token)
_convolution = Replacement("a causal convolution", _why_not_convolution, _convolve)
_convolution_update = Replacement("a causal convolution", _why_not_convolution_update, _convolve_update)

# By the names of functions of the hub. Mamba and Mamba-2 share selective_state_update, so that is not among them.
BY_LAYER_NAME = {
    "chunk_gated_delta_rule": _chunks,
    "fused_recurrent_gated_delta_rule": _tokens,
    "chunk_kda": _kda_chunks,
    "fused_recurrent_kda": _kda_tokens,
    "mamba_chunk_scan_combined": _ssd_chunks,
    "causal_conv1d_fn": _convolution,
    "causal_conv1d_update": _convolution_update,
}
# By the names of functions in the code of models.
BY_FUNCTION = {
    "torch_chunk_gated_delta_rule": _chunks,
    "torch_recurrent_gated_delta_rule": _tokens,
    "chunk_kimi_delta_attention": _kda_chunks,
    "recurrent_kimi_delta_attention": _kda_tokens,
    "mamba2_chunk_scan": _ssd_chunks,
    "mamba2_selective_state_update": _ssd_tokens,
    "causal_conv1d_fn": _convolution,
    "causal_conv1d_update": _convolution_update,
}
