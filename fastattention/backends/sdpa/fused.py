"""torch's scaled_dot_product_attention: which calls it can compute, and how to call it."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastattention.attention.problem import PAIR_MASK, Inputs, Layout, Problem
from fastattention.backends.sdpa import gpu_kernels
from fastattention.backends.sdpa.chunked import compute_chunked
from fastattention.backends.sdpa.masks import Chunk, Mask, chunk_mask, chunks, hides_nothing, sees_everything
from fastattention.backends.sdpa.parts import Part, aligned, are_aligned, fold_groups, unfold_groups

# Off the CPU head dimensions are padded to a multiple of this: for others, torch uses a kernel that stores all scores.
_HEADDIM_MULTIPLE = 8
torch_attention = torch._C._nn.scaled_dot_product_attention  # that of torch.nn.functional, if nothing replaces it there
_MASKS = frozenset({"alibi_slopes", "attn_bias", "block_mask", PAIR_MASK})  # arguments that are an attn_mask of torch


def can_express(problem: Problem) -> bool:
    """True when scaled_dot_product_attention computes everything this call asks for."""
    scores_only = _MASKS.issuperset(problem.score_arguments) and not problem.return_lse
    # Some of torch's kernels mask scores before scaling: with a scale that is not positive, hidden keys would count.
    scale_fits = problem.softmax_scale > 0.0
    # Off the CPU torch's fused backward adds in any order; the backward of the math path does not.
    repeatable = not (problem.deterministic and problem.needs_grad) or problem.device.type == "cpu"
    return scores_only and scale_fits and repeatable


class _Whole(NamedTuple):
    """A call that one call of torch's function serves."""

    arguments: dict[str, Any]
    by_gpu_kernels: bool  # only GPU kernels serve it, because they support heads that share keys
    off_cpu: bool


def attend_whole(problem: Problem, inputs: Inputs) -> Tensor | None:
    """The result of a call that one call of torch's function serves without copies; None for all others.

    It does what `attend` does in fewer steps, because the steps take longer than attention of a short call.
    """
    whole = _whole(problem)
    if whole is None or (whole.by_gpu_kernels and not gpu_kernels.share_keys(problem)):
        return None
    q, k, v = inputs.q, inputs.k, inputs.v
    if whole.off_cpu and not are_aligned(q, k, v):
        return None
    out = torch_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), **whole.arguments)
    return out.transpose(1, 2).contiguous()


@functools.lru_cache(maxsize=4096)
def _whole(problem: Problem) -> _Whole | None:
    """None unless one call of torch's function serves `problem`, for any strides and any of torch's settings."""
    if not _is_one_call(problem):
        return None
    causal, shared = not _sees_everything(problem), problem.group_size > 1
    if shared and not (_shares_keys(problem) if causal else gpu_kernels.HAS_ENABLE_GQA):
        return None
    arguments = {"is_causal": causal, "scale": problem.softmax_scale, **_gqa(problem)}
    return _Whole(arguments, shared and not causal, problem.device.type != "cpu")


def _is_one_call(problem: Problem) -> bool:
    """Whether one call of torch's function serves a problem, apart from heads that share keys."""
    fits = (
        problem.dtype is not torch.float16 if problem.device.type == "cpu" else problem.headdim % _HEADDIM_MULTIPLE == 0
    )
    return (
        fits
        and problem.layout is Layout.DENSE
        and problem.headdim == problem.headdim_v
        and min(problem.batch_size, problem.seqlen_q, problem.seqlen_k, problem.nheads, problem.headdim) > 0
        and can_express(problem)
        and not problem.score_arguments
        and (_sees_everything(problem) or (problem.is_causal and problem.seqlen_q == problem.seqlen_k))
    )


def _sees_everything(problem: Problem) -> bool:
    return hides_nothing(problem.seqlen_q, problem.seqlen_k, problem.window_left, problem.window_right)


def attend(problem: Problem, part: Part) -> Tensor:
    """Attention of a part that has queries and keys: (batch_size, nheads, seqlen_q, headdim_v)."""
    dtype = _working_dtype(part)
    if not part.q.dtype is part.k.dtype is part.v.dtype is dtype:
        part = part._replace(q=part.q.to(dtype), k=part.k.to(dtype), v=part.v.to(dtype))
    plain = part.slopes is None and part.bias is None and part.blocks is None
    if plain and sees_everything(problem, part):
        out = _attend_unmasked(problem, part)
    elif plain and problem.is_causal and part.q.shape[2] == part.k.shape[2] and _shares_keys(problem):
        out = _attend_causal(problem, part)
    else:
        out = _attend_masked(problem, part)
    return out.to(problem.dtype)


def _working_dtype(part: Part) -> torch.dtype:
    """float32 where the mask needs its precision or float16 is slow, otherwise the dtype of q."""
    if part.slopes is not None or (part.bias is not None and part.bias.dtype is torch.float32):
        return torch.float32
    if part.q.dtype is torch.float16 and part.q.device.type == "cpu":
        return torch.float32
    return part.q.dtype


def _shares_keys(problem: Problem) -> bool:
    """True when torch serves query heads that share a key head without storing scores or copies of keys."""
    if problem.group_size == 1:
        return True
    return gpu_kernels.HAS_ENABLE_GQA and (problem.device.type == "cpu" or problem.dtype is not torch.float32)


def _shares_keys_unmasked(problem: Problem) -> bool:
    """True where GPU kernels support groups. For few queries they split the keys, but not with folded heads."""
    return problem.group_size == 1 or (gpu_kernels.HAS_ENABLE_GQA and gpu_kernels.share_keys(problem))


def _gqa(problem: Problem) -> dict[str, Any]:
    """The argument that tells torch that heads share keys; torch before 2.5 lacks it."""
    return {"enable_gqa": True} if problem.group_size > 1 else {}


def _attend_unmasked(problem: Problem, part: Part) -> Tensor:
    if _shares_keys_unmasked(problem):
        return _sdpa(problem, part.q, part.k, part.v, **_gqa(problem))
    return _attend_folded(problem, part.q, part.k, part.v, None)


def _attend_causal(problem: Problem, part: Part) -> Tensor:
    """Attention under a square causal mask, which torch aligns as we do and whose hidden half it skips."""
    return _sdpa(problem, part.q, part.k, part.v, is_causal=True, **_gqa(problem))


def _attend_masked(problem: Problem, part: Part) -> Tensor:
    """Attention under any other mask, built chunk by chunk so that it never takes seqlen_q x seqlen_k memory."""
    shared_by_heads = part.slopes is None and part.bias is None and part.blocks is None
    copies = problem.group_size if shared_by_heads else part.q.shape[0] * problem.nheads
    cut = list(chunks(problem, part, copies * part.k.shape[2]))
    outs = compute_chunked(lambda chunk: _attend_chunk(problem, part, chunk), cut, problem.needs_grad)
    return torch.cat(outs, dim=2)


def _attend_chunk(problem: Problem, part: Part, chunk: Chunk) -> Tensor:
    """Attention of a chunk: (batch_size, nheads, rows, headdim_v)."""
    q, k, v = part.q[:, :, chunk.rows], part.k[:, :, chunk.keys], part.v[:, :, chunk.keys]
    if k.shape[2] == 0:
        return q.new_zeros((*q.shape[:3], problem.headdim_v))
    attn_mask, dead = _attn_mask(chunk_mask(problem, part, chunk), q.dtype)
    return _attend_folded(problem, q, k, v, attn_mask).masked_fill(dead, 0.0)


def _attn_mask(mask: Mask, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(attn_mask for torch, rows without keys).

    Rows without keys see all keys, because torch would give NaN results or gradients. The caller sets them to 0.
    """
    if mask.added is None:
        assert mask.visible is not None
        visible = mask.visible if mask.visible.dim() == 4 else mask.visible[None, None]
        dead = ~visible.any(dim=-1, keepdim=True)
        return visible | dead, dead
    added = mask.added if mask.visible is None else mask.added.masked_fill(~mask.visible, -torch.inf)
    dead = added.isneginf().all(dim=-1, keepdim=True)
    # The mask is made contiguous: results would inherit the strides of an expanded bias, which torch's kernels refuse.
    return added.masked_fill(dead, 0.0).to(dtype).contiguous(), dead


def _attend_folded(problem: Problem, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None) -> Tensor:
    if problem.group_size == 1:
        return _sdpa(problem, q, k, v, attn_mask=attn_mask)
    if attn_mask is not None:
        shared_by_heads = attn_mask.shape[1] == 1
        attn_mask = (
            attn_mask.repeat(1, 1, problem.group_size, 1)
            if shared_by_heads
            else fold_groups(attn_mask, problem.nheads_k)
        )
    out = _sdpa(problem, fold_groups(q, problem.nheads_k), k, v, attn_mask=attn_mask)
    return unfold_groups(out, problem.group_size)


def _sdpa(problem: Problem, q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Tensor:
    """scaled_dot_product_attention, with q, k and v in a head dimension and in memory that its kernels take."""
    width = max(problem.headdim, problem.headdim_v)
    if q.device.type != "cpu":
        width = -(-width // _HEADDIM_MULTIPLE) * _HEADDIM_MULTIPLE
    if not q.shape[3] == v.shape[3] == width:
        q, k, v = (F.pad(x, (0, width - x.shape[3])) if x.shape[3] < width else x for x in (q, k, v))
    if q.device.type != "cpu":
        q, k, v = (aligned(x) for x in (q, k, v))
    out = torch_attention(q, k, v, scale=problem.softmax_scale, **arguments)
    return out if out.shape[3] == problem.headdim_v else out[..., : problem.headdim_v]
