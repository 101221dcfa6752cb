"""Scores of any size that float32 has, in our kernels for Ascend, run on the processor."""

from __future__ import annotations

import pytest
import torch
from conformance.large_scores import SCALES, check_large_products, check_large_sinks
from tiers import sampled

from ascend.engine import BACKENDS

every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@sampled
@pytest.mark.parametrize(("scale", "size"), SCALES)
@every_dtype
def test_products_may_be_large(dtype: torch.dtype, scale: float, size: float) -> None:
    check_large_products(BACKENDS[dtype](), dtype, scale, size, 9)


@sampled
@pytest.mark.parametrize("modified", [False, True])
@every_dtype
def test_sinks_may_be_large(dtype: torch.dtype, modified: bool) -> None:
    check_large_sinks(BACKENDS[dtype](), dtype, modified)
