"""Calls torch's fused GPU kernels by their operators below autograd.

They give lse too, and FlashAttention aligns a causal mask to the bottom right, where scaled_dot_product_attention does
neither.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch import Tensor
from torch.backends import cuda as switches

from fastattention.attention.problem import AttentionOutput, Layout, Problem

HAS_ENABLE_GQA = torch.__version__ >= "2.5"  # whether torch's functions know of heads that share keys
_HEADDIM_MULTIPLE = 8  # that both kernels take
_MOST_HEADDIM_OF_FLASH = 128
# Beyond them FlashAttention-2's backward is faster than ours (docs/benchmarks/gpu-backward.md).
_NARROW, _LONG = 64, 2048  # head dimension, queries and keys
_FIRST_FLASH, _FIRST_CUDNN = (8, 0), (9, 0)  # compute capabilities; before Hopper cuDNN's is the slower one


def can_serve(problem: Problem) -> bool:
    """Whether one of them serves what scaled_dot_product_attention does not."""
    return (problem.return_lse or _is_lower_right(problem)) and computes(problem) and kernel_of(problem) is not None


@functools.lru_cache(maxsize=4096)
def computes(problem: Problem) -> bool:
    """Whether their operators express the call, whatever torch has switched on."""
    return (
        problem.layout is Layout.DENSE
        and _could_take(problem)
        and problem.softmax_scale > 0.0
        and not (problem.score_arguments or problem.needs_grad)
        and (_sees_everything(problem) or (problem.is_causal and problem.seqlen_q <= problem.seqlen_k))
        and min(problem.batch_size, problem.seqlen_q, problem.seqlen_k) > 0
    )


@functools.lru_cache(maxsize=4096)
def differentiates(problem: Problem) -> bool:
    """Whether torch's kernel serves a call with gradients: of out alone, and added in any order."""
    wanted = bool(problem.grads) and not (problem.in_transform or problem.deterministic or problem.return_lse)
    shares = problem.group_size == 1 or HAS_ENABLE_GQA
    return wanted and shares and computes(replace(problem, grads=()))


def why_faster_backward(problem: Problem) -> str | None:
    """Why FlashAttention-2, where torch has no faster kernel, differentiates a call faster than ours, or None."""
    is_long = problem.headdim > _NARROW and min(problem.seqlen_q, problem.seqlen_k) >= _LONG
    if not (is_long and differentiates(problem)) or _is_lower_right(problem) or kernel_of(problem) != "flash":
        return None
    return "FlashAttention-2's backward is 1.1 to 1.3 times as fast as our kernels on an H200"


def share_keys(problem: Problem) -> bool:
    """Whether they serve heads that share keys, within scaled_dot_product_attention too."""
    return _share_keys(problem, switches.cudnn_sdp_enabled(), switches.flash_sdp_enabled())  # type: ignore[no-untyped-call]


@functools.lru_cache(maxsize=4096)
def _share_keys(problem: Problem, cudnn: bool, flash: bool) -> bool:
    """By one look-up: before a short call each takes its time."""
    return _could_take(problem) and _kernel(problem, cudnn, flash) is not None


@functools.lru_cache(maxsize=4096)
def _could_take(problem: Problem) -> bool:
    return (
        problem.device.type == "cuda"
        and problem.dtype in (torch.float16, torch.bfloat16)
        and problem.headdim == problem.headdim_v
        and problem.headdim % _HEADDIM_MULTIPLE == 0
    )


def attend(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> AttentionOutput:
    """Attention to heads first, of a problem that one of them `computes`."""
    if kernel_of(problem) == "cudnn":
        return attend_by_cudnn(problem, q, k, v)
    out, lse, *_ = torch._scaled_dot_product_flash_attention(
        q, k, v, 0.0, not _sees_everything(problem), False, scale=problem.softmax_scale
    )
    return AttentionOutput(out, lse if problem.return_lse else None)


def attend_by_cudnn(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> AttentionOutput:
    """Attention by cuDNN's kernel, where `kernel_of` has named it."""
    out, lse, *_ = torch._scaled_dot_product_cudnn_attention(
        q, k, v, None, problem.keeps_lse, 0.0, problem.is_causal, False, scale=problem.softmax_scale
    )
    return AttentionOutput(out, lse.view(out.shape[:3]) if problem.return_lse else None)


def kernel_of(problem: Problem) -> str | None:
    """The one that torch has switched on, the GPU is new enough for, and the call fits: "cudnn" or "flash"."""
    return _kernel(problem, switches.cudnn_sdp_enabled(), switches.flash_sdp_enabled())  # type: ignore[no-untyped-call]


def _kernel(problem: Problem, cudnn: bool, flash: bool) -> str | None:
    if torch.version.hip is not None:
        return None
    capability = _capability(problem.device)
    # The kernel that cuDNN has for a single query adds up lse in any order.
    fits_cudnn = problem.seqlen_q > 1 and not _is_lower_right(problem)
    if cudnn and capability >= _FIRST_CUDNN and fits_cudnn and _cudnn_takes(problem):
        return "cudnn"
    return "flash" if flash and capability >= _FIRST_FLASH and problem.headdim <= _MOST_HEADDIM_OF_FLASH else None


@functools.lru_cache(maxsize=4096)
def _cudnn_takes(problem: Problem) -> bool:
    """By torch's own account, which knows this cuDNN's limits, of tensors of these shapes that take no memory."""
    if not hasattr(switches, "can_use_cudnn_attention"):
        return False  # before torch 2.5
    with torch.cuda.device(problem.device):
        row = torch.empty(problem.headdim, dtype=problem.dtype, device=problem.device)
        row.requires_grad_(bool(problem.grads))

        def repeated(nheads: int, seqlen: int) -> Tensor:
            return row.as_strided((problem.batch_size, nheads, seqlen, problem.headdim), (0, 0, 0, 1))

        q, k = repeated(problem.nheads, problem.seqlen_q), repeated(problem.nheads_k, problem.seqlen_k)
        call = switches.SDPAParams(q, k, k, None, 0.0, False, problem.group_size > 1)
        return bool(switches.can_use_cudnn_attention(call))


def _is_lower_right(problem: Problem) -> bool:
    """Causal, with more keys than queries, of which a single one sees all."""
    return problem.is_causal and 1 < problem.seqlen_q < problem.seqlen_k


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _sees_everything(problem: Problem) -> bool:
    return problem.window_left == -1 and (problem.window_right == -1 or problem.seqlen_q == 1)
