"""Checks that all public functions share, from shapes, dtypes and devices alone."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy
import torch
from torch import Tensor
from torch.autograd import forward_ad

from fastattention.attention.problem import MAX_HEADDIM, MAX_HEADDIM_V, Inputs, Problem
from fastattention.errors import ArgumentError

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_FLOAT32 = torch.finfo(torch.float32)  # in which scores are computed
QK_DTYPES = {"int8": torch.int8}  # in which queries and keys may be multiplied, but for their own
_QK_DTYPE_NAMES = " or ".join(map(repr, QK_DTYPES))


class Options(NamedTuple):
    """The scalar arguments of a call as `read_options` has read them: of the right types, values not yet checked."""

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
    return_mask: bool = False  # of dropout; no scalar of the operators, which cannot return it


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
        """The tensors as they were given; cache_seqlens is missing unless it is one."""
        lengths = self.cache_seqlens if isinstance(self.cache_seqlens, Tensor) else None
        return Inputs(
            self.q, self.k_cache, self.v_cache, None, None, lengths, self.cache_batch_idx, self.cache_leftpad,
            self.block_table, self.k, self.v, self.rotary_cos, self.rotary_sin, self.alibi_slopes, self.attn_bias,
            self.sinks, None, None, self.k_scale, self.v_scale,
        )  # fmt: skip


class Signature(NamedTuple):
    """What checks of shapes, dtypes and devices need of a tensor."""

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
    qk_dtype: torch.dtype | None
    return_lse: bool
    return_mask: bool


def require_tensor(name: str, value: object) -> None:
    """Raises ArgumentError unless `value` is a tensor."""
    if not isinstance(value, Tensor):
        raise ArgumentError(f"{name} must be a torch.Tensor, got {type(value).__name__}")


def require_tensors(**values: object) -> None:
    """Raises ArgumentError, with its name, for the first of `values` that is not a tensor."""
    for name, value in values.items():
        require_tensor(name, value)


def signature(name: str, value: object) -> Signature:
    """The Signature of a tensor; raises ArgumentError naming anything else."""
    require_tensor(name, value)
    assert isinstance(value, Tensor)
    return Signature(value.shape, value.dtype, value.device)


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
        dropout_p if type(dropout_p) is float else read_number("dropout_p", dropout_p),
        deterministic if type(deterministic) is bool else read_flag("deterministic", deterministic),
        qk_dtype=qk_dtype,
        return_lse=return_lse,
        return_mask=return_mask,
    )


def read_int(name: str, value: object, allowed: str = "an integer") -> int:
    """`value` as an int; raises ArgumentError naming anything that is not an integer."""
    try:
        return operator.index(_scalar(value))  # type: ignore[arg-type]
    except TypeError as error:
        raise ArgumentError(f"{name} must be {allowed}, got {value!r}") from error


def read_flag(name: str, value: object) -> bool:
    """`value` as a bool; raises ArgumentError naming anything but True, False, 0 and 1."""
    value = _scalar(value)
    if not isinstance(value, (int, numpy.bool_)) or value not in (0, 1):
        raise ArgumentError(f"{name} must be True or False, got {value!r}")
    return bool(value)


def _scalar(value: object) -> object:
    """`value`, but a number for what torch.compile makes of a NumPy scalar: an array without axes."""
    return value.item() if isinstance(value, numpy.ndarray) and value.ndim == 0 else value


def read_number(name: str, value: object) -> float:
    """`value` as a float; raises ArgumentError naming anything that is not a number."""
    value = _scalar(value)
    if not isinstance(value, numbers.Real):
        raise ArgumentError(f"{name} must be a number, got {value!r}")
    try:
        return float(value)
    except OverflowError:
        raise ArgumentError(f"{name} is an integer that no float holds") from None


def _window_pair(window_size: Sequence[int] | Tensor) -> tuple[int, int]:
    """(left, right) from a pair or a tensor of two integers."""
    try:
        left, right = (operator.index(side) for side in window_size)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"window_size must be two integers (left, right), got {window_size!r}") from error
    return left, right


def check_options(options: Options, headdim: int, seqlen_q: int, seqlen_k: int) -> Scores:
    """Validates the values of the scalar arguments and fills in defaults."""
    scale = headdim**-0.5 if options.softmax_scale is None else options.softmax_scale
    if not abs(scale) <= _FLOAT32.max:
        raise ArgumentError(f"softmax_scale={scale} must be finite in float32; None means headdim ** -0.5")
    if abs(scale) < _FLOAT32.tiny:
        scale = 0.0  # what kernels make of it that know no subnormal numbers
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
    return Scores(
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


def check_rank(name: str, tensor: Signature, axes: str) -> None:
    """Raises unless `tensor` has as many dimensions as the text `axes` has names, separated by commas."""
    if len(tensor.shape) != axes.count(",") + 1:
        raise ArgumentError(f"{name} must be ({axes}), got shape {tuple(tensor.shape)}")


def check_shape(name: str, tensor: Signature, expected: tuple[int, ...], axes: str) -> None:
    """Raises unless the shape is exactly `expected`."""
    if tuple(tensor.shape) != expected:
        raise ArgumentError(f"{name} must be ({axes}) = {expected}, got shape {tuple(tensor.shape)}")


def check_device(name: str, tensor: Signature, q: Signature) -> None:
    """Raises unless the device is that of q."""
    if tensor.device != q.device:
        raise ArgumentError(f"{name} is on {tensor.device} and q on {q.device}; they must be on the same device")


def check_dtype(q: Signature) -> None:
    """Raises unless the dtype of q is one that calls take."""
    if q.dtype not in DTYPES:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise ArgumentError(f"q has dtype {q.dtype}; allowed are {allowed}")


def check_like_q(name: str, tensor: Signature, q: Signature) -> None:
    """Raises unless dtype and device are those of q."""
    if tensor.dtype is not q.dtype:
        raise ArgumentError(f"{name} has dtype {tensor.dtype} and q has {q.dtype}; they must be the same")
    check_device(name, tensor, q)


def check_qkv(q: Signature, k: Signature, v: Signature, k_name: str = "k", v_name: str = "v") -> None:
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
        check_device(name, tensor, q)
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
    check_device("attn_bias", bias, q)
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
    check_device(name, tensor, q)
    sizes_fit = len(tensor.shape) == len(shape) and all(
        wanted in (-1, given) for given, wanted in zip(tensor.shape, shape, strict=True)
    )
    if not sizes_fit:
        expected = ", ".join("any" if size == -1 else str(size) for size in shape)
        raise ArgumentError(f"{name} must be ({axes}) = ({expected}), got shape {tuple(tensor.shape)}")


def last_axis_contiguous(tensor: Tensor) -> Tensor:
    """`tensor`, copied only when its last axis is strided; kernels take any other strides."""
    return tensor if tensor.stride()[-1] == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def as_kernels_read(problem: Problem, inputs: Inputs, names: Sequence[str] = Inputs._fields) -> Inputs:
    """Tensors as they were given, in the strides and dtypes that backends take: nothing is copied that has them.

    names: of the tensors to look at
    """
    made: dict[str, Tensor] = {}
    for name in names:
        if (tensor := getattr(inputs, name)) is None:
            continue
        if name == "attn_bias":
            made[name] = tensor.expand(problem.bias_shape)
        elif name == "block_mask":
            made[name] = tensor.expand(problem.blocks_shape)
        elif name in _CONVERSIONS:
            made[name] = _CONVERSIONS[name](tensor)
    return inputs._replace(**made)


class Differentiation(NamedTuple):
    """How a call is differentiated: the fields of Problem that say so."""

    grads: tuple[str, ...] = ()
    in_transform: bool = False


def differentiation(**arguments: object) -> Differentiation:
    """What autograd wants of a call with these arguments, backward and forward."""
    tensors = [(name, argument) for name, argument in arguments.items() if isinstance(argument, Tensor)]
    in_transform = torch._C._functorch.maybe_current_level() is not None and is_differentiating()
    if not in_transform and forward_ad._current_level >= 0:  # within forward_ad.dual_level
        in_transform = any(forward_ad.unpack_dual(x).tangent is not None for _, x in tensors)  # type: ignore[no-untyped-call]
    records = torch.is_grad_enabled()
    return Differentiation(tuple(name for name, x in tensors if records and x.requires_grad), in_transform)


def needs_grad(*arguments: object) -> bool:
    """True when autograd wants to differentiate through a call with these arguments, backward or forward."""
    wanted = differentiation(**{str(index): argument for index, argument in enumerate(arguments)})
    return bool(wanted.grads) or wanted.in_transform


def is_differentiating() -> bool:
    """True within torch.func.grad, jvp and what is made of them, where not every tensor says that it is followed."""
    return _is_within(torch._C._functorch.TransformType.Grad, torch._C._functorch.TransformType.Jvp)


def is_functionalizing() -> bool:
    """True within torch.func.functionalize."""
    return not torch.compiler.is_compiling() and _is_within(torch._C._functorch.TransformType.Functionalize)


def _is_within(*transforms: object) -> bool:
    return any(level.key() in transforms for level in torch._C._functorch.get_interpreter_stack() or ())


def _as_float32(tensor: Tensor) -> Tensor:
    """Per-head values in the dtype in which kernels read them."""
    return tensor.to(torch.float32).contiguous()


# Scales are written in place and never copied; so are caches, whose last axis has been checked.
_CONVERSIONS: dict[str, Callable[[Tensor], Tensor]] = {
    **dict.fromkeys(("q", "k", "v", "k_new", "v_new", "block_table"), last_axis_contiguous),
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "cache_seqlens", "cache_batch_idx"), Tensor.contiguous),
    **dict.fromkeys(("cache_leftpad", "rotary_cos", "rotary_sin"), Tensor.contiguous),
    **dict.fromkeys(("alibi_slopes", "sinks"), _as_float32),
}
