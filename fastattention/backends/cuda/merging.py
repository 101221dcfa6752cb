"""The launch that merges attention over parts of the keys, and its parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastattention.backends.common.layout import pointers, token_strides
from fastattention.backends.common.params import Params
from fastattention.backends.cuda.kernel_config import MERGE_COLUMNS, MERGE_WARPS, MergeConfig
from fastattention.backends.cuda.params import MOST_PARTS, MergeParams
from fastattention.gpu_runtime.module import KernelLaunch

DTYPE_NAMES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}
MOST_WARPS = 2**31 - 1  # of a launch: kernels count them in 32 bits


class MergePlan(NamedTuple):
    """How parts of some shape and strides are merged."""

    launch: KernelLaunch | None  # none when there is nothing to compute
    template: bytes


def num_warps(out_shape: Sequence[int]) -> int:
    """Warps that merge outs of a shape: one at least for a row, since lse is written without columns too."""
    return math.prod(out_shape[:-1]) * max(-(-out_shape[-1] // MERGE_COLUMNS), 1)


def make_merge_plan(outs: Sequence[Tensor], lses: Sequence[Tensor], dtype: torch.dtype) -> MergePlan:
    """The plan of one launch: up to MOST_PARTS parts into an out of `dtype`."""
    *batch, tokens, nheads, headdim_v = outs[0].shape
    batch_size = math.prod(batch)
    strides = [(*token_strides(out), *_lse_strides(lse)) for out, lse in zip(outs, lses, strict=True)]
    strides += [(0,) * 6] * (MOST_PARTS - len(outs))
    by_axis = [stride for axis in zip(*strides, strict=True) for stride in axis]
    template = MergeParams.template(*by_axis, len(outs), batch_size, tokens, nheads, headdim_v)
    num_ctas = -(-num_warps(outs[0].shape) // MERGE_WARPS)
    config = MergeConfig(DTYPE_NAMES[outs[0].dtype], DTYPE_NAMES[dtype])
    return MergePlan(KernelLaunch(config, 0, num_ctas) if num_ctas else None, template)


def merge_params(template: bytes, outs: Sequence[Tensor], lses: Sequence[Tensor], out: Tensor, lse: Tensor) -> Params:
    """The parameters of a launch."""
    missing = (0,) * (MOST_PARTS - len(outs))
    addresses = (*pointers(*outs), *missing, *pointers(*lses), *missing)
    return MergeParams.make(template, *addresses, out.data_ptr(), lse.data_ptr())


def _lse_strides(lse: Tensor) -> tuple[int, int, int]:
    """(batch, head, token) strides of (batch_size, nheads, tokens), or varlen (nheads, tokens)."""
    *batch, head, token = lse.stride()
    return batch[0] if batch else 0, head, token
