"""The launch that merges attention over parts of the keys, and its parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastattention.backends.common.c_struct import Params
from fastattention.backends.common.layout import named_strides, pointers, token_strides
from fastattention.backends.cuda.attention.config import MergeConfig
from fastattention.backends.cuda.attention.params import MOST_PARTS, MergeParams
from fastattention.gpu_runtime.module import KernelLaunch

DTYPES = torch.float16, torch.bfloat16, torch.float32
_make_params = MergeParams.maker("outs", "lses", "out", "lse")
MOST_WARPS = 2**31 - 1  # warps of a launch: kernels count them in 32 bits


class MergeLaunch(NamedTuple):
    """How parts of some shape and strides are merged."""

    launch: KernelLaunch | None  # none when there is nothing to compute
    template: bytes


def num_warps(out_shape: Sequence[int]) -> int:
    """Warps that merge outs of a shape: one at least for a row, since lse is written without columns too."""
    return math.prod(out_shape[:-1]) * max(-(-out_shape[-1] // MergeConfig.columns_of_warp), 1)


def make_merge_launch(outs: Sequence[Tensor], lses: Sequence[Tensor], dtype: torch.dtype) -> MergeLaunch:
    """One launch: up to MOST_PARTS parts into an out of `dtype`."""
    *batch, tokens, nheads, headdim_v = outs[0].shape
    batch_size = math.prod(batch)
    missing = [(0, 0, 0)] * (MOST_PARTS - len(outs))
    outs_strides = zip(*map(token_strides, outs), *missing, strict=True)  # for each axis, the strides of all parts
    lses_strides = zip(*map(_lse_strides, lses), *missing, strict=True)
    template = MergeParams.template(
        **named_strides("outs", outs_strides),
        **named_strides("lses", lses_strides, "batch head row"),
        num_parts=len(outs),
        batch_size=batch_size,
        tokens=tokens,
        nheads=nheads,
        headdim_v=headdim_v,
    )
    num_ctas = -(-num_warps(outs[0].shape) // MergeConfig.num_warps)
    config = MergeConfig(outs[0].dtype, dtype)
    return MergeLaunch(KernelLaunch(config, 0, num_ctas) if num_ctas else None, template)


def merge_params(template: bytes, outs: Sequence[Tensor], lses: Sequence[Tensor], out: Tensor, lse: Tensor) -> Params:
    """The parameters of a launch."""
    missing = (0,) * (MOST_PARTS - len(outs))
    addresses = (*pointers(*outs), *missing, *pointers(*lses), *missing)
    return _make_params(template, *addresses, out.data_ptr(), lse.data_ptr())


def _lse_strides(lse: Tensor) -> tuple[int, int, int]:
    """(batch, head, token) strides of (batch_size, nheads, tokens), or varlen (nheads, tokens)."""
    *batch, head, token = lse.stride()
    return batch[0] if batch else 0, head, token
