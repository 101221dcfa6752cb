"""Launches as an NPU would get them: by Triton-Ascend's own runtime, as far as the compiler that comes with CANN."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from triton.backends.ascend.compiler import AscendBackend as TritonAscend
from triton.backends.compiler import GPUTarget
from triton.compiler.errors import MLIRCompilationError
from triton.runtime import driver

from ascend.engine import launches_of
from fastattention.backends.ascend import call
from fastattention.backends.ascend.backend import AscendBackend
from fastattention.backends.ascend.chips import CHIPS
from fastattention.backends.ascend.tiling import Tiling
from fastattention.testing.calls import build_call
from fastattention.testing.case import Case, DenseCase, KvCacheCase

TILING = Tiling(outer_tile_m=64, outer_tile_n=64, inner_tile_m=16, preload=1, multibuffer=True)
TARGET = GPUTarget("npu", "Ascend910B3", 0)


class NoDriver:
    """A driver with everything that is asked before a kernel runs."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return TARGET


CASES: list[Case] = [
    DenseCase(name="window", seqlen_q=70, seqlen_k=90, window=(20, 9)),
    KvCacheCase(name="pages-append", cache_seqlens=(70, 40), page_block_size=16, seqlen_q=2, seqlen_new=2, causal=True),
    KvCacheCase(name="splits", cache_seqlens=(600, 9), sinks=True, nheads=4, num_splits=5),
]


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_launch_reaches_the_compiler_of_cann(case: Case, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(driver, "active", NoDriver())
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    for launch in launches_of(build_call(case, torch.float16)):
        with pytest.raises(MLIRCompilationError, match=r"ConvertLinalgRToBinary(?s:.*)ASCEND_HOME_PATH is not set"):
            AscendBackend()._launch(launch)


def kernel_key(launch: call.Launch) -> object:
    """The key under which Triton caches a compiled kernel."""
    launch.kernel.create_binder(TritonAscend(TARGET))
    _, types_and_values, constants, _, options = launch.kernel.binder(
        **launch.arguments, **launch.constants, **launch.options
    )
    return types_and_values, constants, options


@pytest.mark.parametrize("seqlens", [(64, 96), (65, 96), (2, 81)], ids=str)
def test_no_kernel_is_compiled_for_a_length(seqlens: tuple[int, int]) -> None:
    """Nor when a size becomes 1 or a multiple of 16, for which Triton usually compiles again."""
    keys = []
    for seqlen_q, seqlen_k in ((70, 90), seqlens):
        case = DenseCase(name="length", seqlen_q=seqlen_q, seqlen_k=seqlen_k, causal=True)
        (launch,) = call.prepare(*build_call(case, torch.float16).prepare(), TILING, CHIPS["910B3"]).launches
        keys.append(kernel_key(launch))
    assert keys[0] == keys[1]
