"""Calls torch's fused GPU kernels by their operators below autograd.

They return lse too, and FlashAttention aligns a causal mask to the bottom right. scaled_dot_product_attention does
neither.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch import Tensor
from torch.backends import cuda as switches

from fastattention.attention.problem import AttentionOutput, Layout, Problem

HAS_ENABLE_GQA = torch.__version__ >= "2.5"  # whether torch's functions support heads that share keys
_HEADDIM_MULTIPLE = 8  # head dimensions that both kernels take are multiples of it
_MOST_HEADDIM_OF_FLASH = 128
_FIRST_FLASH, _FIRST_CUDNN = (8, 0), (9, 0)  # compute capabilities; before Hopper cuDNN's kernel is the slower one


def can_serve(problem: Problem) -> bool:
    """Whether one of these kernels serves a problem that scaled_dot_product_attention does not."""
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
    """Whether torch's kernel serves a call with gradients: only of out, and added in any order."""
    wanted = bool(problem.grads) and not (problem.in_transform or problem.deterministic or problem.return_lse)
    shares = problem.group_size == 1 or HAS_ENABLE_GQA
    return wanted and shares and computes(replace(problem, grads=()))


def share_keys(problem: Problem) -> bool:
    """Whether they serve heads that share keys, within scaled_dot_product_attention too."""
    return _share_keys(problem, switches.cudnn_sdp_enabled(), switches.flash_sdp_enabled())  # type: ignore[no-untyped-call]


@functools.lru_cache(maxsize=4096)
def _share_keys(problem: Problem, cudnn: bool, flash: bool) -> bool:
    """`share_keys`, cached by torch's settings: before a short call every look-up counts."""
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
    """Attention of tensors with heads first, for a problem that a kernel `computes`."""
    if kernel_of(problem) == "cudnn":
        return attend_by_cudnn(problem, q, k, v)
    out, lse, *_ = torch._scaled_dot_product_flash_attention(
        q, k, v, 0.0, not _sees_everything(problem), False, scale=problem.softmax_scale
    )
    return AttentionOutput(out, lse if problem.return_lse else None)


def attend_by_cudnn(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> AttentionOutput:
    """Attention by cuDNN's kernel, where `kernel_of` names it."""
    out, lse, *_ = torch._scaled_dot_product_cudnn_attention(
        q, k, v, None, problem.keeps_lse, 0.0, problem.is_causal, False, scale=problem.softmax_scale
    )
    return AttentionOutput(out, lse.view(out.shape[:3]) if problem.return_lse else None)


def kernel_of(problem: Problem) -> str | None:
    """The kernel that torch has switched on, and that suits the GPU and the call: "cudnn", "flash" or None."""
    return _kernel(problem, switches.cudnn_sdp_enabled(), switches.flash_sdp_enabled())  # type: ignore[no-untyped-call]


def _kernel(problem: Problem, cudnn: bool, flash: bool) -> str | None:
    if torch.version.hip is not None:
        return None
    capability = _capability(problem.device)
    # cuDNN's kernel for a single query adds up lse in any order.
    fits_cudnn = problem.seqlen_q > 1 and not _is_lower_right(problem)
    if cudnn and capability >= _FIRST_CUDNN and fits_cudnn and _cudnn_takes(problem):
        return "cudnn"
    return "flash" if flash and capability >= _FIRST_FLASH and problem.headdim <= _MOST_HEADDIM_OF_FLASH else None


@functools.lru_cache(maxsize=4096)
def _cudnn_takes(problem: Problem) -> bool:
    """Whether cuDNN takes a problem: asks torch, which knows its limits, with tensors that take no memory."""
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
    """Whether a mask is causal with more keys than queries. A single query sees all keys, so it needs no mask."""
    return problem.is_causal and 1 < problem.seqlen_q < problem.seqlen_k


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _sees_everything(problem: Problem) -> bool:
    return problem.window_left == -1 and (problem.window_right == -1 or problem.seqlen_q == 1)
