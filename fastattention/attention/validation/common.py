"""Checks that all public functions share, from shapes, dtypes and devices alone."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastattention.attention.problem import MAX_HEADDIM, MAX_HEADDIM_V, Inputs, Problem
from fastattention.engine.checks import (
    TensorSpec,
    check_device,
    check_dtype,
    check_like_q,
    check_shape,
    last_axis_contiguous,
    read_flag,
    read_number,
    spec_of,
)
from fastattention.errors import ArgumentError

_FLOAT32 = torch.finfo(torch.float32)  # scores are computed in float32
SCORE_TENSORS = ("alibi_slopes", "attn_bias", "sinks")  # optional tensors that change scores or weights
QK_DTYPES = {"int8": torch.int8}  # dtypes in which queries and keys may be multiplied, besides their own
_QK_DTYPE_NAMES = " or ".join(map(repr, QK_DTYPES))


class Options(NamedTuple):
    """The scalar arguments of a call, of the right types; values are not yet checked."""

    softmax_scale: float | None = None
    causal: bool = False
    window_left: int = -1
    window_right: int = -1
    softcap: float = 0.0
    dropout_p: float = 0.0
    deterministic: bool = False
    block_m: int = 0  # tokens of a block of the block mask; 0 without one
    block_n: int = 0
    qk_dtype: str | None = None
    return_lse: bool = False
    return_mask: bool = False  # whether to return the dropout mask, which operators of torch cannot return
    max_seqlen_q: int | None = None  # longest sequences of a varlen call; None derives them
    max_seqlen_k: int | None = None
    rotary_interleaved: bool = True
    num_splits: int = 0
    panels: PanelCache | None = None  # for calls of a PackedKVStore


class PanelCache(NamedTuple):
    """A cache in interleaved panels (common/panel_cache.py): what its dense k_cache and v_cache would be."""

    k: TensorSpec
    v: TensorSpec
    panel_size: int


class KvCacheArguments(NamedTuple):
    """The tensors of fast_attn_with_kvcache, in its order; `cache_seqlens` may be one length for all sequences."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    k: Tensor | None = None
    v: Tensor | None = None
    rotary_cos: Tensor | None = None
    rotary_sin: Tensor | None = None
    cache_seqlens: Tensor | int | None = None
    cache_batch_idx: Tensor | None = None
    cache_leftpad: Tensor | None = None
    block_table: Tensor | None = None
    alibi_slopes: Tensor | None = None
    attn_bias: Tensor | None = None
    sinks: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    def inputs(self) -> Inputs:
        """The tensors as they were given, with cache_seqlens if it is one."""
        lengths = self.cache_seqlens if isinstance(self.cache_seqlens, Tensor) else None
        return Inputs(
            self.q, self.k_cache, self.v_cache, None, None, self.block_table, self.alibi_slopes, self.attn_bias,
            self.sinks, None, None, None, None, self.k_scale, self.v_scale, lengths, self.cache_batch_idx,
            self.cache_leftpad, self.k, self.v, self.rotary_cos, self.rotary_sin,
        )  # fmt: skip


ScoreSpecs = tuple[tuple[str, TensorSpec], ...]


class CheckedOptions(NamedTuple):
    """Options after validation: the scalars that shape the scores, ready for Problem."""

    softmax_scale: float
    window_left: int
    window_right: int
    softcap: float
    dropout_p: float
    deterministic: bool
    qk_dtype: torch.dtype | None
    return_lse: bool
    return_mask: bool


def read_options(
    softmax_scale: object,
    causal: object,
    window_size: Sequence[int] | Tensor,
    softcap: object,
    dropout_p: object = 0.0,
    deterministic: object = False,
    return_lse: bool = False,
    return_mask: bool = False,
    qk_dtype: object = None,
) -> Options:
    """Options from arguments as given: reads window_size and raises ArgumentError for anything of a wrong type."""
    if not (qk_dtype is None or isinstance(qk_dtype, str)):
        raise ArgumentError(f"qk_dtype must be None or {_QK_DTYPE_NAMES}, got {qk_dtype!r}")
    left, right = window_size if type(window_size) is tuple and len(window_size) == 2 else (None, None)
    if not type(left) is type(right) is int:
        left, right = _window_pair(window_size)
    if not (softmax_scale is None or type(softmax_scale) is float):
        softmax_scale = read_number("softmax_scale", softmax_scale)
    return Options(
        softmax_scale,
        causal if type(causal) is bool else read_flag("causal", causal),
        left,
        right,
        softcap if type(softcap) is float else read_number("softcap", softcap),
        dropout_p if type(dropout_p) is float else _read_dropout(dropout_p),
        deterministic if type(deterministic) is bool else read_flag("deterministic", deterministic),
        qk_dtype=qk_dtype,
        return_lse=return_lse,
        return_mask=return_mask,
    )


def _read_dropout(dropout_p: object) -> float:
    """`dropout_p` as a float. It comes after v, where a caller may expect causal."""
    if dropout_p is True:
        raise ArgumentError("dropout_p must be a number below 1, got True; give causal by keyword: causal=True")
    return read_number("dropout_p", dropout_p)


def _window_pair(window_size: Sequence[int] | Tensor) -> tuple[int, int]:
    """(left, right) from a pair or a tensor of two integers."""
    try:
        left, right = (operator.index(side) for side in window_size)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"window_size must be two integers (left, right), got {window_size!r}") from error
    return left, right


def check_options(options: Options, headdim: int, seqlen_q: int, seqlen_k: int) -> CheckedOptions:
    """Validates the values of the scalar arguments and fills in defaults."""
    scale = headdim**-0.5 if options.softmax_scale is None else options.softmax_scale
    if not abs(scale) <= _FLOAT32.max:
        raise ArgumentError(f"softmax_scale={scale} must be finite in float32; None means headdim ** -0.5")
    if abs(scale) < _FLOAT32.tiny:
        scale = 0.0  # kernels that flush subnormal values to zero would compute with 0
    if options.window_left < -1 or options.window_right < -1:
        given = (options.window_left, options.window_right)
        raise ArgumentError(f"window_size={given}: each side must be -1 (unlimited) or at least 0")
    if not (options.softcap == 0.0 or _FLOAT32.tiny <= options.softcap <= _FLOAT32.max):
        raise ArgumentError(
            f"softcap={options.softcap} must be finite in float32 and at least 0 (0 turns it off); no positive one "
            f"may be below {_FLOAT32.tiny:.2g}"
        )
    if not 0.0 <= options.dropout_p < 1.0:
        raise ArgumentError(f"dropout_p={options.dropout_p} must be at least 0 and below 1")
    if options.qk_dtype is not None and options.qk_dtype not in QK_DTYPES:
        raise ArgumentError(f"qk_dtype must be None or {_QK_DTYPE_NAMES}, got {options.qk_dtype!r}")
    # A side this wide hides nothing; kernels hold it in 32 bits.
    widest = seqlen_q + seqlen_k
    return CheckedOptions(
        softmax_scale=scale,
        window_left=min(options.window_left, widest),
        window_right=0 if options.causal else min(options.window_right, widest),
        softcap=options.softcap,
        dropout_p=options.dropout_p,
        deterministic=options.deterministic,
        qk_dtype=None if options.qk_dtype is None else QK_DTYPES[options.qk_dtype],
        return_lse=bool(options.return_lse),
        return_mask=bool(options.return_mask and options.dropout_p),
    )


def check_qkv(q: TensorSpec, k: TensorSpec, v: TensorSpec, k_name: str = "k", v_name: str = "v") -> None:
    """Checks dtype, device and the last two axes (heads, head dimension) of q, k and v."""
    check_dtype(q)
    check_like_q(k_name, k, q)
    check_like_q(v_name, v, q)
    (nheads, headdim), (nheads_k, headdim_k), (nheads_v, headdim_v) = q.shape[-2:], k.shape[-2:], v.shape[-2:]
    if headdim_k != headdim:
        raise ArgumentError(f"{k_name} has headdim {headdim_k} and q has {headdim}; they must be the same")
    for name, value, most in (("headdim", headdim, MAX_HEADDIM), ("headdim_v", headdim_v, MAX_HEADDIM_V)):
        if not 1 <= value <= most:
            raise ArgumentError(f"{name}={value} is not supported; allowed are 1 to {most}")
    if nheads_v != nheads_k:
        raise ArgumentError(f"{v_name} has {nheads_v} heads and {k_name} has {nheads_k}; they must be the same")
    if nheads_k < 1 or nheads < 1 or nheads % nheads_k:
        raise ArgumentError(f"nheads={nheads} of q must be a positive multiple of nheads_k={nheads_k} of {k_name}")


def score_specs(given: Inputs | KvCacheArguments) -> ScoreSpecs:
    """Name and spec of each of SCORE_TENSORS that a call has."""
    tensors = [(name, getattr(given, name)) for name in SCORE_TENSORS]
    return tuple((name, spec_of(name, tensor)) for name, tensor in tensors if tensor is not None)


def check_score_tensors(
    specs: ScoreSpecs, q: TensorSpec, batch_size: int, bias_shape: tuple[int, ...], bias_axes: str
) -> tuple[str, ...]:
    """Checks the tensors of `score_specs`, and returns their names, ready for Problem."""
    nheads = q.shape[-2]
    for name, tensor in specs:
        if name == "attn_bias":
            _check_bias(tensor, q, bias_shape, bias_axes)
            continue
        if not tensor.dtype.is_floating_point:
            raise ArgumentError(f"{name} must be floating point, got {tensor.dtype}")
        check_device(name, tensor, q)
        if name != "alibi_slopes":
            check_shape(name, tensor, (nheads,), "nheads")
        elif tuple(tensor.shape) not in ((nheads,), (batch_size, nheads)):
            raise ArgumentError(
                f"alibi_slopes must be (nheads,) = ({nheads},) or (batch_size, nheads) = ({batch_size}, {nheads}), "
                f"got shape {tuple(tensor.shape)}"
            )
    return tuple(name for name, _ in specs)


def _check_bias(bias: TensorSpec, q: TensorSpec, full_shape: tuple[int, ...], axes: str) -> None:
    """Raises unless `bias` is a float tensor that broadcasts to `full_shape`."""
    if bias.dtype is not q.dtype and bias.dtype is not torch.float32:
        hint = "; for a bool mask give torch.where(mask, 0.0, -torch.inf)" if bias.dtype is torch.bool else ""
        raise ArgumentError(f"attn_bias must be float32 or the dtype of q ({q.dtype}), got {bias.dtype}{hint}")
    check_device("attn_bias", bias, q)
    shape = tuple(bias.shape)
    fits = len(shape) <= len(full_shape) and all(
        given in (1, wanted) for given, wanted in zip(reversed(shape), reversed(full_shape), strict=False)
    )
    if not fits:
        raise ArgumentError(f"attn_bias must broadcast to ({axes}) = {full_shape}, got shape {shape}")


def as_kernels_read(problem: Problem, inputs: Inputs, names: Sequence[str] = Inputs._fields) -> Inputs:
    """The given tensors in the strides and dtypes that backends take. Only those that have others are copied.

    names: the tensors to look at
    """
    made: dict[str, Tensor] = {}
    for name in names:
        if (tensor := getattr(inputs, name)) is None:
            continue
        if name == "attn_bias":
            made[name] = tensor.expand(problem.bias_shape)
        elif name == "block_mask":
            made[name] = tensor.expand(problem.blocks_shape)
        elif name == "tile_index":
            made[name] = tensor.expand(problem.tiles_shape)
        elif name in _CONVERSIONS:
            made[name] = _CONVERSIONS[name](tensor)
    return inputs._replace(**made)


def _as_float32(tensor: Tensor) -> Tensor:
    """Per-head values in the dtype in which kernels read them."""
    return tensor.to(torch.float32).contiguous()


# Scales are written in place and never copied; so are caches, whose last axis has been checked.
_CONVERSIONS: dict[str, Callable[[Tensor], Tensor]] = {
    **dict.fromkeys(("q", "k", "v", "k_new", "v_new", "block_table"), last_axis_contiguous),
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "cache_seqlens", "cache_batch_idx"), Tensor.contiguous),
    "tile_bits": Tensor.contiguous,
    **dict.fromkeys(("cache_leftpad", "rotary_cos", "rotary_sin"), Tensor.contiguous),
    **dict.fromkeys(SCORE_TENSORS, _as_float32),  # attn_bias is expanded instead, and keeps its dtype
}
