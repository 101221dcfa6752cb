"""NVRTC compiles the kernels of the indexer and the selection for their own code path, and they fit their registers."""

from __future__ import annotations

import pytest
import torch
from tiers import sampled, slow

from fastattention.backends.cuda.indexer.config import TopKeysConfig
from fastattention.backends.cuda.indexer.heuristics import choose
from fastattention.backends.cuda.selection.backend import SelectionConfig
from fastattention.engine.operator import request_of
from fastattention.gpu_runtime import compiler
from fastattention.gpu_runtime.chips import CHIPS
from fastattention.gpu_runtime.variant import Variant
from fastattention.indexer import fast_indexer_func
from fastattention.indexer.validation import prepare
from fastattention.testing.indexer import IndexerCase

REASON = compiler.why_unavailable()
pytestmark = [slow, pytest.mark.skipif(REASON is not None, reason=str(REASON))]
every_chip = pytest.mark.parametrize("chip", ["P100", "V100", "T4", "A100", "RTX 3090", "H100"])


def check_registers(kernel: Variant, chip: str) -> None:
    target = CHIPS[chip].target
    if (reason := compiler.why_not_target(target)) is not None:
        pytest.skip(reason)
    resources = compiler.compile_kernel(kernel, target).resources
    assert resources.keys() == {entry.name for entry in kernel.entries}
    assert all(one.spill_bytes == one.stack_bytes == 0 for one in resources.values())


@sampled
@pytest.mark.parametrize("keys", ["rows", "pages"])
@pytest.mark.parametrize("headdim", [64, 128])
@pytest.mark.parametrize("nheads", [15, 16, 32, 64])
@pytest.mark.parametrize("seqlen_q", [1, 2, 4, 8])
@every_chip
def test_scores_spill_nothing(chip: str, seqlen_q: int, nheads: int, headdim: int, keys: str) -> None:
    limits = CHIPS[chip]
    dtype = torch.bfloat16 if limits.arch >= 80 else torch.float16
    case = IndexerCase(seqlen_q=seqlen_q, nheads=nheads, headdim=headdim, keys=keys)
    _, given, options, *_ = request_of(fast_indexer_func, **case.arguments(dtype))
    check_registers(choose(prepare(given, options)[0], limits.arch, limits).config, chip)


@sampled
@pytest.mark.parametrize("num_warps", [8, 32])
@every_chip
def test_the_choice_of_keys_spills_nothing(chip: str, num_warps: int) -> None:
    check_registers(TopKeysConfig(num_warps), chip)


@pytest.mark.parametrize("wide_indices", [False, True], ids=["int32", "int64"])
@every_chip
def test_the_selection_of_slots_spills_nothing(chip: str, wide_indices: bool) -> None:
    check_registers(SelectionConfig(wide_indices), chip)
