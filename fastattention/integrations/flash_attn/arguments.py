"""Arguments of FlashAttention 3 and 4 that fastattention has no name for: read, or refused by name."""

from __future__ import annotations

import torch
from torch import Tensor

from fastattention.engine.checks import check_like_q, check_shape, spec_of
from fastattention.errors import UnsupportedError

_MODS = "kernels here take no functions of scores; fast_attn_func has attn_bias, which is added to the scores"
_BLOCKS = "give a bool block_mask to fast_attn_func or fast_attn_varlen_func"

# Arguments that change results and are not served -> what to do.
_REFUSED = {
    "rotary_seqlens": "rotary embedding starts at cache_seqlens here; rotate q and k before the call",
    "qv": "the cache would be copied in every call; give one cache (..., headdim_v + headdim) of values and keys, q as "
    "torch.cat((qv, q), -1) and v_cache as k_cache[..., :headdim_v] to fast_attn_with_kvcache",
    "score_mod": _MODS,
    "score_mod_bwd": _MODS,
    "mask_mod": _MODS,
    "aux_tensors": _MODS,
    "aux_scalars": _MODS,
    "block_sparse_tensors": _BLOCKS,
    "block_sparse_tensors_bwd": _BLOCKS,
    "gather_kv_indices": "kernels here select keys by block: " + _BLOCKS,
}


def refuse(**given: object) -> None:
    """Raises UnsupportedError for the first argument that is not None."""
    for name, value in given.items():
        if value is not None:
            raise UnsupportedError(f"{name} is not served: {_REFUSED[name]}")


def refuse_float8(q: Tensor) -> None:
    """Raises UnsupportedError for queries in float8, the only ones that q_descale, k_descale and v_descale concern."""
    if isinstance(q, Tensor) and q.dtype.is_floating_point and q.dtype.itemsize == 1:
        raise UnsupportedError(
            f"q has dtype {q.dtype}, which is not served; give q in float16 or bfloat16. Caches may be in float8: give "
            "k_scale and v_scale to fast_attn_with_kvcache"
        )


def with_values_in_keys(q: Tensor, k: Tensor, v: Tensor, qv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(q, k, v) whose scores are q @ k^T + qv @ v^T of the given ones.

    qv: as q, with headdim_v. Queries and keys are copied; values become the first columns of the new keys.
    """
    spec = spec_of("q", q)
    specs = [(name, spec_of(name, tensor)) for name, tensor in (("k", k), ("v", v), ("qv", qv))]
    for name, other in specs:
        check_like_q(name, other, spec)
    headdim_v = v.shape[-1]
    check_shape("v", specs[1][1], (*k.shape[:-1], headdim_v), "as k, with headdim_v")
    check_shape("qv", specs[2][1], (*q.shape[:-1], headdim_v), "as q, with headdim_v")
    keys = torch.cat((v, k), dim=-1)
    return torch.cat((qv, q), dim=-1), keys, keys[..., :headdim_v]
