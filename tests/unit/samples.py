"""What many tests begin with: a small integer tensor, the mask of a window, problems and calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattention.attention.problem import Layout, Problem
from fastattention.quantized import dequantize, quantize

DEFAULTS: dict[str, Any] = {
    "layout": Layout.DENSE, "device": torch.device("cuda", 0), "dtype": torch.float16, "batch_size": 1, "seqlen_q": 128,
    "seqlen_k": 4096, "nheads": 8, "nheads_k": 2, "headdim": 128, "softmax_scale": 0.125, "window_left": -1,
    "window_right": -1,
}  # fmt: skip


def int32(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def visible(seqlen_q: int, seqlen_k: int, left: int = -1, right: int = -1) -> Tensor:
    """Bool (seqlen_q, seqlen_k): what a window shows, from its definition."""
    beyond = torch.arange(seqlen_k) - torch.arange(seqlen_q)[:, None] - (seqlen_k - seqlen_q)
    return ((beyond >= -left) | (left < 0)) & ((beyond <= right) | (right < 0))


def problem_of(**changes: Any) -> Problem:
    """A problem of DEFAULTS with changes. total_q and headdim_v follow from the other sizes, unless given."""
    fields = DEFAULTS | changes
    derived = {"total_q": fields["batch_size"] * fields["seqlen_q"], "headdim_v": fields["headdim"]}
    return Problem(**derived | fields)


def quantized_selection(cache_dtype: torch.dtype) -> tuple[dict[str, Any], dict[str, Any]]:
    """A call of fast_attn_selected_func with quantized latents, and one with float32 tensors of the same values."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 3, 6, 80, generator=generator).half()
    latents = torch.randn(2, 70, 1, 80, generator=generator)
    k, k_scale = quantize(latents, cache_dtype)
    v, v_scale = quantize(latents[..., :64], cache_dtype)
    indices = torch.randint(-1, 70, (2, 3, 25), generator=generator).int()
    shared = {"indices": indices, "causal": True, "return_lse": True}
    exact = {"q": q.float(), "k": dequantize(k, k_scale), "v": dequantize(v, v_scale)}
    return shared | {"q": q, "k": k, "v": v, "k_scale": k_scale, "v_scale": v_scale}, shared | exact
