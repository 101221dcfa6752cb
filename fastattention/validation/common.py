"""Checks shared by all public functions, made from shapes, dtypes and devices alone."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastattention.errors import ArgumentError

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEADDIM = 256


class Options(NamedTuple):
    """The scalar arguments of a call, as given except for `window_size`, which `window_pair` has read."""

    softmax_scale: float | None = None
    causal: bool = False
    window_left: int = -1
    window_right: int = -1
    softcap: float = 0.0
    dropout_p: float = 0.0
    deterministic: bool = False
    return_lse: bool = False


class Signature(NamedTuple):
    """What the cached checks need of a tensor."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def __str__(self) -> str:
        return f"{tuple(self.shape)} {str(self.dtype).removeprefix('torch.')} on {self.device}"


class Scores(NamedTuple):
    """Options after validation: the scalars that shape the scores, ready for Problem."""

    softmax_scale: float
    window_left: int
    window_right: int
    softcap: float
    dropout_p: float
    deterministic: bool
    return_lse: bool


def signature(tensor: Tensor | None) -> Signature | None:
    """The Signature of a tensor; None stays None."""
    return None if tensor is None else Signature(tensor.shape, tensor.dtype, tensor.device)


def require_tensor(name: str, value: object) -> Tensor:
    """`value` if it is a tensor; raises ArgumentError naming it otherwise."""
    if not isinstance(value, Tensor):
        raise ArgumentError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    return value


def window_pair(window_size: Sequence[int] | Tensor) -> tuple[int, int]:
    """(left, right) from a pair or a tensor of two integers; -1 is unlimited."""
    try:
        left, right = (int(side) for side in window_size)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"window_size must be two integers (left, right), got {window_size!r}") from error
    if left < -1 or right < -1:
        raise ArgumentError(f"window_size=({left}, {right}): each side must be -1 (unlimited) or at least 0")
    return left, right


@functools.lru_cache(maxsize=1024)
def check_options(options: Options, headdim: int) -> Scores:
    """Validates the scalar arguments and fills in defaults."""
    scale = headdim**-0.5 if options.softmax_scale is None else float(options.softmax_scale)
    if not math.isfinite(scale):
        raise ArgumentError(f"softmax_scale={scale} must be finite; None means headdim ** -0.5")
    if not (math.isfinite(options.softcap) and options.softcap >= 0.0):
        raise ArgumentError(f"softcap={options.softcap} must be finite and at least 0 (0 turns it off)")
    if not 0.0 <= options.dropout_p < 1.0:
        raise ArgumentError(f"dropout_p={options.dropout_p} must be at least 0 and below 1")
    return Scores(
        softmax_scale=scale,
        window_left=options.window_left,
        window_right=0 if options.causal else options.window_right,
        softcap=float(options.softcap),
        dropout_p=float(options.dropout_p),
        deterministic=bool(options.deterministic),
        return_lse=bool(options.return_lse),
    )


def check_rank(name: str, tensor: Signature, axes: str) -> None:
    """Raises unless `tensor` has as many dimensions as `axes`, a text such as "batch_size, seqlen_q, nheads, headdim"."""
    if len(tensor.shape) != axes.count(",") + 1:
        raise ArgumentError(f"{name} must be ({axes}), got shape {tuple(tensor.shape)}")


def check_shape(name: str, tensor: Signature, expected: tuple[int, ...], axes: str) -> None:
    """Raises unless the shape is exactly `expected`."""
    if tuple(tensor.shape) != expected:
        raise ArgumentError(f"{name} must be ({axes}) = {expected}, got shape {tuple(tensor.shape)}")


def check_like_q(name: str, tensor: Signature, q: Signature) -> None:
    """Raises unless dtype and device are those of q."""
    if tensor.dtype is not q.dtype:
        raise ArgumentError(f"{name} has dtype {tensor.dtype} and q has {q.dtype}; they must be the same")
    if tensor.device != q.device:
        raise ArgumentError(f"{name} is on {tensor.device} and q on {q.device}; they must be on the same device")


def check_qkv(q: Signature, k: Signature, v: Signature, k_name: str = "k", v_name: str = "v") -> None:
    """Checks dtype, device and the last two axes (heads, head dimension) of q, k and v."""
    if q.dtype not in DTYPES:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise ArgumentError(f"q has dtype {q.dtype}; allowed are {allowed}")
    check_like_q(k_name, k, q)
    check_like_q(v_name, v, q)
    (nheads, headdim), (nheads_k, headdim_k), (nheads_v, headdim_v) = q.shape[-2:], k.shape[-2:], v.shape[-2:]
    if headdim_k != headdim:
        raise ArgumentError(f"{k_name} has headdim {headdim_k} and q has {headdim}; they must be the same")
    for name, value in (("headdim", headdim), ("headdim_v", headdim_v)):
        if not 1 <= value <= MAX_HEADDIM:
            raise ArgumentError(f"{name}={value} is not supported; allowed are 1 to {MAX_HEADDIM}")
    if nheads_v != nheads_k:
        raise ArgumentError(f"{v_name} has {nheads_v} heads and {k_name} has {nheads_k}; they must be the same")
    if nheads_k < 1 or nheads < 1 or nheads % nheads_k:
        raise ArgumentError(f"nheads={nheads} of q must be a positive multiple of nheads_k={nheads_k} of {k_name}")


def check_score_tensors(
    q: Signature,
    batch_size: int,
    nheads: int,
    alibi_slopes: Signature | None,
    sinks: Signature | None,
) -> None:
    """Checks the per-head tensors that enter the scores."""
    for name, tensor in (("alibi_slopes", alibi_slopes), ("sinks", sinks)):
        if tensor is None:
            continue
        if not tensor.dtype.is_floating_point:
            raise ArgumentError(f"{name} must be floating point, got {tensor.dtype}")
        if tensor.device != q.device:
            raise ArgumentError(f"{name} is on {tensor.device} and q on {q.device}; they must be on the same device")
    if sinks is not None:
        check_shape("sinks", sinks, (nheads,), "nheads")
    if alibi_slopes is not None and tuple(alibi_slopes.shape) not in ((nheads,), (batch_size, nheads)):
        raise ArgumentError(
            f"alibi_slopes must be (nheads,) = ({nheads},) or (batch_size, nheads) = ({batch_size}, {nheads}), "
            f"got shape {tuple(alibi_slopes.shape)}"
        )


def check_bias(bias: Signature | None, q: Signature, full_shape: tuple[int, ...], axes: str) -> None:
    """Raises unless `bias` is a float tensor that broadcasts to `full_shape`."""
    if bias is None:
        return
    if bias.dtype is not q.dtype and bias.dtype is not torch.float32:
        hint = "; for a bool mask give torch.where(mask, 0.0, -torch.inf)" if bias.dtype is torch.bool else ""
        raise ArgumentError(f"attn_bias must be float32 or the dtype of q ({q.dtype}), got {bias.dtype}{hint}")
    if bias.device != q.device:
        raise ArgumentError(f"attn_bias is on {bias.device} and q on {q.device}; they must be on the same device")
    shape = tuple(bias.shape)
    fits = len(shape) <= len(full_shape) and all(
        given in (1, wanted) for given, wanted in zip(reversed(shape), reversed(full_shape), strict=False)
    )
    if not fits:
        raise ArgumentError(f"attn_bias must broadcast to ({axes}) = {full_shape}, got shape {shape}")


def check_index(name: str, tensor: Signature, q: Signature, shape: tuple[int, ...], axes: str) -> None:
    """Checks an int32 tensor of lengths or indices; -1 in `shape` matches any size."""
    if tensor.dtype is not torch.int32:
        raise ArgumentError(f"{name} must be int32, got {tensor.dtype}")
    if tensor.device != q.device:
        raise ArgumentError(f"{name} is on {tensor.device} and q on {q.device}; they must be on the same device")
    sizes_fit = len(tensor.shape) == len(shape) and all(
        wanted in (-1, given) for given, wanted in zip(tensor.shape, shape, strict=True)
    )
    if not sizes_fit:
        expected = ", ".join("any" if size == -1 else str(size) for size in shape)
        raise ArgumentError(f"{name} must be ({axes}) = ({expected}), got shape {tuple(tensor.shape)}")


def last_axis_contiguous(tensor: Tensor) -> Tensor:
    """`tensor`, copied only when its last axis is strided; kernels take any other strides."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def needs_grad(*tensors: Tensor | None) -> bool:
    """True when autograd wants to differentiate through this call."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def as_float32(tensor: Tensor | None) -> Tensor | None:
    """Per-head values in the dtype in which kernels read them."""
    return None if tensor is None else tensor.to(torch.float32).contiguous()
