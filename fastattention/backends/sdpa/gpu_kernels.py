"""Calls torch's fused GPU kernels by their operators below autograd.

They give lse too, and FlashAttention aligns a causal mask to the bottom right, where scaled_dot_product_attention does
neither.
"""

from __future__ import annotations

import functools

import torch
from torch.backends import cuda as switches

from fastattention.backends.sdpa.parts import Part
from fastattention.problem import AttentionOutput, Layout, Problem

_HEADDIM_MULTIPLE, _MOST_HEADDIM = 8, 128  # that both kernels take
_FIRST_FLASH, _FIRST_CUDNN = (8, 0), (9, 0)  # compute capabilities; before Hopper cuDNN's is the slower one


def can_serve(problem: Problem) -> bool:
    """Whether one of them serves what scaled_dot_product_attention does not."""
    return torch.version.hip is None and _could_serve(problem) and kernel_of(problem) is not None


def share_keys(problem: Problem) -> bool:
    """Whether they serve heads that share keys, within scaled_dot_product_attention too."""
    return _share_keys(problem, switches.cudnn_sdp_enabled(), switches.flash_sdp_enabled())  # type: ignore[no-untyped-call]


@functools.lru_cache(maxsize=4096)
def _share_keys(problem: Problem, cudnn: bool, flash: bool) -> bool:
    """By one look-up: before a short call each takes its time."""
    return torch.version.hip is None and _could_take(problem) and _kernel(problem, cudnn, flash) is not None


@functools.lru_cache(maxsize=4096)
def _could_serve(problem: Problem) -> bool:
    """Whatever torch has switched on."""
    return (
        (problem.return_lse or _is_lower_right(problem))
        and problem.layout is Layout.DENSE
        and _could_take(problem)
        and problem.softmax_scale > 0.0
        and _is_plain(problem)
        and (_sees_everything(problem) or (problem.is_causal and problem.seqlen_q <= problem.seqlen_k))
        and min(problem.batch_size, problem.seqlen_q, problem.seqlen_k) > 0
    )


@functools.lru_cache(maxsize=4096)
def _could_take(problem: Problem) -> bool:
    return (
        problem.device.type == "cuda"
        and problem.dtype in (torch.float16, torch.bfloat16)
        and problem.headdim == problem.headdim_v <= _MOST_HEADDIM
        and problem.headdim % _HEADDIM_MULTIPLE == 0
    )


def attend(problem: Problem, part: Part) -> AttentionOutput:
    """Attention of a part of a problem that `can_serve` accepted."""
    kernel = kernel_of(problem)
    causal = not _sees_everything(problem)
    aten, scale = torch.ops.aten, problem.softmax_scale
    if kernel == "cudnn":
        results = aten._scaled_dot_product_cudnn_attention(
            part.q, part.k, part.v, None, True, 0.0, causal, False, scale=scale
        )
    else:
        results = aten._scaled_dot_product_flash_attention(part.q, part.k, part.v, 0.0, causal, False, scale=scale)
    out, lse = results[:2]
    return AttentionOutput(out, lse.view(out.shape[:3]) if problem.return_lse else None)


def kernel_of(problem: Problem) -> str | None:
    """The one that torch has switched on, the GPU is new enough for, and the mask fits: "cudnn" or "flash"."""
    return _kernel(problem, switches.cudnn_sdp_enabled(), switches.flash_sdp_enabled())  # type: ignore[no-untyped-call]


def _kernel(problem: Problem, cudnn: bool, flash: bool) -> str | None:
    capability = _capability(problem.device)
    if cudnn and capability >= _FIRST_CUDNN and not _is_lower_right(problem):
        return "cudnn"
    return "flash" if flash and capability >= _FIRST_FLASH else None


def _is_lower_right(problem: Problem) -> bool:
    """Causal, with more keys than queries, of which a single one sees all."""
    return problem.is_causal and 1 < problem.seqlen_q < problem.seqlen_k


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _is_plain(problem: Problem) -> bool:
    return not (
        problem.softcap
        or problem.has_sinks
        or problem.has_alibi
        or problem.has_bias
        or problem.dropout_p
        or problem.needs_grad
    )


def _sees_everything(problem: Problem) -> bool:
    return problem.window_left == -1 and (problem.window_right == -1 or problem.seqlen_q == 1)
