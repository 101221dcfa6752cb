"""Launches kernels/sum_parts.cuh, the sum of parts of one size that a collective needs between copies."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from fastattention.backends.cuda.kernel_config import SUM_WARPS, SumConfig
from fastattention.backends.cuda.merging import DTYPE_NAMES
from fastattention.backends.cuda.params import MOST_PARTS, SumParams
from fastattention.gpu_runtime.module import KernelLaunch

NUMBERS_OF_CTA = SUM_WARPS * 32 * 4


@functools.lru_cache(maxsize=1024)
def sum_launch(dtype: torch.dtype, count: int) -> KernelLaunch:
    """The launch for `count` numbers."""
    return KernelLaunch(SumConfig(DTYPE_NAMES[dtype]), 0, -(-count // NUMBERS_OF_CTA))


def sum_params(parts: Sequence[int], shared: int, out: int, count: int) -> SumParams:
    """Its parameters. parts: addresses of up to MOST_PARTS, added up in their order."""
    missing = (0,) * (MOST_PARTS - len(parts))
    params = SumParams.make(SumParams.template(count, len(parts)), *parts, *missing, shared, out)
    assert isinstance(params, SumParams)
    return params


def sum_parts(
    parts: Sequence[int], shared: int, out: int, count: int, dtype: torch.dtype, device_index: int, stream: int
) -> None:
    """Enqueues the sum of `count` numbers at each of `parts` to `shared` and to `out`, all of them addresses.

    Numbers are float16, bfloat16 or float32, added in float32 and rounded once. The device must be the current one.
    """
    launch = sum_launch(dtype, count)
    launch.function(device_index).launch(sum_params(parts, shared, out, count), launch.num_ctas, stream)
