"""NVRTC compiles the kernels of the causal convolution, and they fit their registers."""

from __future__ import annotations

import pytest
from tiers import deep, sampled, slow

from fastattention.backends.cuda.convolution.config import convolution_variants
from fastattention.gpu_runtime import compiler
from fastattention.gpu_runtime.chips import CHIPS
from fastattention.gpu_runtime.variant import Variant

REASON = compiler.why_unavailable()
pytestmark = [slow, pytest.mark.skipif(REASON is not None, reason=str(REASON))]


@sampled
@pytest.mark.parametrize("chip", ["V100", "H100", *(pytest.param(chip, marks=deep) for chip in ("P100", "T4", "A100"))])
@pytest.mark.parametrize("kernel", convolution_variants(), ids=lambda kernel: kernel.name)
def test_kernels_spill_nothing(kernel: Variant, chip: str) -> None:
    target = CHIPS[chip].target
    if (reason := compiler.why_not_target(target)) is not None:
        pytest.skip(reason)
    cubin = compiler.compile_kernel(kernel, target)
    assert cubin.resources.keys() == {entry.name for entry in kernel.entries}
    assert sum(one.spill_bytes for one in cubin.resources.values()) == 0
