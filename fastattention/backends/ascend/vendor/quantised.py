"""int8 on npu_fused_infer_attention_score: caches in int8, and queries, keys and values in int8.

The ascend backend does not hand calls to these yet; the int8 caches of fast_attn_with_kvcache have scales as TOKEN_HEAD
means them. Quantisation is symmetric everywhere: a number is its int8 times a scale.
"""

from __future__ import annotations

import enum
from typing import Any

import torch
from torch import Tensor

from fastattention.backends.ascend.vendor import cache, limits
from fastattention.backends.ascend.vendor.operators import Call, run
from fastattention.backends.common.results import keyless
from fastattention.errors import ArgumentError
from fastattention.problem import AttentionOutput, Inputs, Layout, Problem

_HEADDIM_STEP = 32  # [I] of limits.py, as are the numbers below: int8 rows are multiples of 32 bytes
_PAGE_STEP = 32
_MAX_QUERIES = 16  # with an int8 cache
_WEIGHT_SCALE = 127.0  # softmax weights are 0 to 1, so this is all that int8 holds


class KeyValueScales(enum.Enum):
    """What of a cache (batch_size, tokens, nheads_k, headdim), or of pages, has a scale of its own.

    The scales have the shape of those axes, one tensor for k and one for v:
    """

    CHANNEL = "channel"  # (nheads_k, headdim), dtype of q
    TOKEN = "token"  # (batch_size, tokens) or (num_blocks, page_block_size), float32
    TOKEN_HEAD = "token_head"  # (batch_size, tokens, nheads_k) or (num_blocks, page_block_size, nheads_k), float32


# key_antiquant_mode and value_antiquant_mode, for rows of a batch and for pages.
_MODES = {
    KeyValueScales.CHANNEL: (0, 0),
    KeyValueScales.TOKEN: (1, 4),
    KeyValueScales.TOKEN_HEAD: (3, 5),
}


def why_not_int8_kv(problem: Problem, scales: KeyValueScales) -> str | None:
    """Why no operator attends to an int8 cache as `problem` says, problem.dtype being that of q; or None."""
    if problem.layout is not Layout.KVCACHE:
        return f"{problem.layout.value} calls have no cache; int8 caches are for those of fast_attn_with_kvcache"
    if (reason := limits.why_not_features(problem) or limits.why_not_inference(problem)) is not None:
        return reason
    if problem.headdim % _HEADDIM_STEP:
        return f"headdim={problem.headdim} must be a multiple of {_HEADDIM_STEP} for an int8 cache"
    if problem.seqlen_q == 1:
        return limits.why_not_page(problem, _PAGE_STEP)
    if problem.seqlen_q > _MAX_QUERIES:
        return f"seqlen_q={problem.seqlen_q}; an int8 cache takes at most {_MAX_QUERIES} queries"
    if problem.dtype is not torch.bfloat16:
        return f"dtype {problem.dtype} with seqlen_q={problem.seqlen_q}; an int8 cache takes bfloat16 beyond one query"
    if problem.is_paged:
        return f"block_table with seqlen_q={problem.seqlen_q}; pages in int8 take one query"
    if scales is not KeyValueScales.TOKEN:
        return f"scales per {scales.value} with seqlen_q={problem.seqlen_q}; beyond one query they are per token"
    return None


def forward_int8_kv(
    problem: Problem, inputs: Inputs, k_scale: Tensor, v_scale: Tensor, scales: KeyValueScales
) -> AttentionOutput:
    """Attention to a cache in int8: keys are inputs.k * k_scale, values inputs.v * v_scale.

    problem: of a call with a cache, dtype that of q and of out; `why_not_int8_kv` has accepted it
    inputs: k and v int8; new tokens are already in the cache
    k_scale, v_scale: as `scales` says
    Raises ArgumentError for scales of another shape or dtype, and for cache_leftpad or cache_batch_idx.
    """
    _check_cache(problem, inputs, scales, k_scale=k_scale, v_scale=v_scale)
    lengths = cache.cache_lengths(problem, inputs)
    if problem.total_q == 0 or max(lengths, default=0) == 0:
        return keyless(problem, inputs)
    placed = cache.place(inputs, max(lengths))
    call = cache.cache_call(problem, placed, lengths)
    mode = _MODES[scales][problem.is_paged]
    quantised: dict[str, Any] = {"key_antiquant_mode": mode, "value_antiquant_mode": mode}
    for name, scale in (("key", k_scale), ("value", v_scale)):
        quantised[f"{name}_antiquant_scale"] = _vendor_scale(problem, scale, scales, placed)
    out, lse = run(Call(call.operator, call.arguments | quantised))
    return cache.finish(problem, placed.layout, lengths, out, lse if problem.return_lse else None)


def _check_cache(problem: Problem, inputs: Inputs, scales: KeyValueScales, **given: Tensor) -> None:
    if inputs.cache_leftpad is not None or inputs.cache_batch_idx is not None:
        raise ArgumentError("cache_leftpad and cache_batch_idx are not served with an int8 cache; leave them out")
    for name, tensor in (("k_cache", inputs.k), ("v_cache", inputs.v)):
        if tensor.dtype is not torch.int8:
            raise ArgumentError(f"{name} must be int8, got {tensor.dtype}")
    axes = inputs.k.shape
    shape = {
        KeyValueScales.CHANNEL: axes[2:],
        KeyValueScales.TOKEN: axes[:2],
        KeyValueScales.TOKEN_HEAD: axes[:3],
    }[scales]
    dtype = problem.dtype if scales is KeyValueScales.CHANNEL else torch.float32
    for name, scale in given.items():
        if scale.shape != shape or scale.dtype is not dtype:
            wanted = f"{dtype} {tuple(shape)} for scales per {scales.value}"
            raise ArgumentError(f"{name} must be {wanted}, got {scale.dtype} {tuple(scale.shape)}")


def _vendor_scale(problem: Problem, scale: Tensor, scales: KeyValueScales, placed: cache.Placed) -> Tensor:
    """A scale as the operator wants it, cut where the cache was cut."""
    if scales is KeyValueScales.CHANNEL:  # (1, nheads_k, headdim), with heads first (1, nheads_k, 1, headdim)
        scale = scale.unsqueeze(1) if placed.layout == "BNSD" else scale
        return scale.unsqueeze(0).contiguous()
    if placed.block_table is None:
        scale = scale[:, : placed.capacity]
    if scales is KeyValueScales.TOKEN_HEAD:
        return scale.transpose(1, 2).contiguous()
    if problem.seqlen_q == 1 and placed.block_table is None:
        scale = scale.unsqueeze(0)
    return scale.contiguous()


def why_not_int8(problem: Problem) -> str | None:
    """Why no operator attends with q, k and v in int8 as `problem` says, or None. problem.dtype is that of out."""
    if problem.layout is not Layout.DENSE:
        return f"{problem.layout.value} calls are not served with q, k and v in int8; dense ones are"
    if problem.dtype is not torch.float16:
        return f"dtype {problem.dtype}; with q, k and v in int8 the result is float16"
    if (reason := limits.why_not_features(problem) or limits.why_not_inference(problem)) is not None:
        return reason
    if problem.headdim % _HEADDIM_STEP:
        return f"headdim={problem.headdim} must be a multiple of {_HEADDIM_STEP} for int8"
    if problem.seqlen_q == 1:
        return "seqlen_q=1; q, k and v in int8 are served for more than one query"
    return None


def forward_int8(problem: Problem, inputs: Inputs, q_scale: float, k_scale: float, v_scale: float) -> AttentionOutput:
    """Attention of dense sequences in int8: queries are inputs.q * q_scale, and so on; out is float16.

    Softmax weights are rounded to int8 too, 127 standing for 1: out is exact to about 1 / 254 of the largest value.
    problem: dtype float16; `why_not_int8` has accepted it
    """
    for name, tensor in (("q", inputs.q), ("k", inputs.k), ("v", inputs.v)):
        if tensor.dtype is not torch.int8:
            raise ArgumentError(f"{name} must be int8, got {tensor.dtype}")
    if problem.total_q == 0 or problem.seqlen_k == 0:
        return keyless(problem, inputs)
    lengths = [problem.seqlen_k] * problem.batch_size
    placed = cache.place(inputs, problem.seqlen_k)
    call = cache.cache_call(problem, placed, lengths)
    scales = {
        "dequant_scale1": q_scale * k_scale,
        "quant_scale1": _WEIGHT_SCALE,
        "dequant_scale2": v_scale / _WEIGHT_SCALE,
    }
    tensors = {
        name: torch.tensor([scale], dtype=torch.float32, device=problem.device) for name, scale in scales.items()
    }
    out, lse = run(Call(call.operator, call.arguments | tensors))
    return cache.finish(problem, placed.layout, lengths, out, lse if problem.return_lse else None)
