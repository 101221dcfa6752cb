"""Arguments of FlashAttention 3 and 4 that fastattention has no name for: read, or refused by name."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from fastattention.engine.checks import check_like_q, check_shape, needs_grad, spec_of
from fastattention.engine.eager import runs_eagerly
from fastattention.errors import UnsupportedError

_MODS = "kernels here take no functions of scores; fast_attn_func has attn_bias, which is added to the scores"
_BLOCKS = "give a bool block_mask to fast_attn_func or fast_attn_varlen_func"

# Arguments that change results and are not served -> what to do.
_REFUSED = {
    "rotary_seqlens": "rotary embedding starts at cache_seqlens here; rotate q and k before the call",
    "qv": "the cache would be copied in every call; let values and keys be parts of one tensor, v = cache[..., "
    ":headdim_v] and k = cache[..., headdim_v:]",
    "score_mod": _MODS,
    "score_mod_bwd": _MODS,
    "mask_mod": _MODS,
    "aux_tensors": _MODS,
    "aux_scalars": _MODS,
    "block_sparse_tensors": _BLOCKS,
    "block_sparse_tensors_bwd": _BLOCKS,
}


def refuse(**given: object) -> None:
    """Raises UnsupportedError for the first argument that is not None."""
    for name, value in given.items():
        if value is not None:
            _raise(name)


def _raise(name: str) -> NoReturn:
    raise UnsupportedError(f"{name} is not served: {_REFUSED[name]}")


def refuse_float8(q: Tensor) -> None:
    """Raises UnsupportedError for queries in float8, the only ones that q_descale, k_descale and v_descale concern."""
    if isinstance(q, Tensor) and q.dtype.is_floating_point and q.dtype.itemsize == 1:
        raise UnsupportedError(
            f"q has dtype {q.dtype}, which is not served; give q in float16 or bfloat16. Caches may be in float8: give "
            "k_scale and v_scale to fast_attn_with_kvcache"
        )


def with_values_in_keys(
    q: Tensor, k: Tensor, v: Tensor, qv: Tensor, copies: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """(q, k, v) whose scores are q @ k^T + qv @ v^T of the given ones. Values are the first columns of the new keys.

    - `qv`: as q, with headdim_v
    - `copies`: whether keys and values may be copied. They are not where they are parts of one tensor that follow each
        other, as latents and their rotated part in a cache. UnsupportedError is raised if they would have to be.
    """
    spec = spec_of("q", q)
    specs = [(name, spec_of(name, tensor)) for name, tensor in (("k", k), ("v", v), ("qv", qv))]
    for name, other in specs:
        check_like_q(name, other, spec)
    headdim_v = v.shape[-1]
    check_shape("v", specs[1][1], (*k.shape[:-1], headdim_v), "as k, with headdim_v")
    check_shape("qv", specs[2][1], (*q.shape[:-1], headdim_v), "as q, with headdim_v")
    if runs_eagerly(k, v) and _follows(k, v):
        keys = v.as_strided((*k.shape[:-1], headdim_v + k.shape[-1]), v.stride())
    elif copies:
        keys = torch.cat((v, k), dim=-1)
    else:
        _raise("qv")
    return torch.cat((qv, q), dim=-1), keys, keys[..., :headdim_v]


def _follows(k: Tensor, v: Tensor) -> bool:
    """Whether each row of k begins where that of v ends, and no gradient has to find its way to both."""
    axes = [axis for axis, size in enumerate(v.shape[:-1]) if size != 1]
    return (
        k.data_ptr() == v.data_ptr() + v.shape[-1] * v.element_size()
        and k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
        and all(k.stride(axis) == v.stride(axis) for axis in axes)
        and k.stride(-1) == v.stride(-1) == 1
        and not needs_grad(k, v)
    )
