"""NVRTC compiles the kernels of chunked linear attention for their own code path, and they fit their registers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tiers import deep, sampled, slow

from fastattention.backends.cuda.linear.chunk_config import TokenProductsConfig
from fastattention.backends.cuda.linear.chunk_heuristics import choose_chunk_kernels, choose_gradient_kernels
from fastattention.gpu_runtime import compiler
from fastattention.gpu_runtime.chips import CHIPS
from fastattention.gpu_runtime.variant import Variant
from fastattention.linear.validation import prepare
from fastattention.testing.linear import LinearCase

REASON = compiler.why_unavailable()
pytestmark = [slow, pytest.mark.skipif(REASON is not None, reason=str(REASON))]


def kernels_of(chip: str, rule: str, headdim: int) -> Iterator[Variant]:
    """Kernels of calls with few sequences, and with many, whose gates have the dtype of the call."""
    limits = CHIPS[chip]
    dtype = torch.bfloat16 if limits.arch >= 80 else torch.float16
    for batch_size, gate_dtype in ((1, torch.float32), (128, None)):
        shape = {"nheads": 16, "nheads_k": 16, "headdim_k": headdim, "headdim_v": headdim}
        case = LinearCase(rule, batch_size, seqlen=1, gate_dtype=gate_dtype, **shape)
        problem, _ = prepare(case.tensors(dtype), case.options(chunked=True))
        yield from choose_chunk_kernels(problem, limits.arch, limits)


@sampled
@pytest.mark.parametrize("rule", ["delta", "head", "key", "kda"])
@pytest.mark.parametrize("headdim", [64, 128])
@pytest.mark.parametrize(
    "chip", ["V100", "A100", *(pytest.param(chip, marks=deep) for chip in ("P100", "T4", "RTX 3090", "H100"))]
)
def test_chunked_kernels_stay_in_registers(chip: str, headdim: int, rule: str) -> None:
    """No array is in local memory, and hardly a register."""
    target = CHIPS[chip].target
    if (reason := compiler.why_not_target(target)) is not None:
        pytest.skip(reason)
    for kernel in dict.fromkeys(kernels_of(chip, rule, headdim)):
        resources = compiler.compile_kernel(kernel, target).resources
        assert resources.keys() == {entry.name for entry in kernel.entries}
        assert max(one.stack_bytes for one in resources.values()) <= 16


@sampled
@pytest.mark.parametrize("rule", ["delta", "head", "key", "kda"])
@pytest.mark.parametrize("headdim", [pytest.param(64, marks=deep), 128])
@pytest.mark.parametrize(
    "chip", ["H100", *(pytest.param(chip, marks=deep) for chip in ("P100", "V100", "T4", "RTX 3090", "A100"))]
)
def test_kernels_of_gradients_spill_little(chip: str, headdim: int, rule: str) -> None:
    """Kernels of tokens fill all registers: some spill up to 600 bytes for a chunk of a head."""
    limits = CHIPS[chip]
    if (reason := compiler.why_not_target(limits.target)) is not None:
        pytest.skip(reason)
    shape = {"nheads": 16, "nheads_k": 16, "headdim_k": headdim, "headdim_v": headdim}
    case = LinearCase(rule, seqlen=1, **shape)
    problem, _ = prepare(case.tensors(torch.float16), case.options(chunked=True))
    kernels = choose_gradient_kernels(problem, limits.arch, limits)
    assert (kernels is None) == ((chip, rule, headdim) == ("P100", "kda", 128))
    for kernel in kernels[2:] if kernels else ():
        resources = compiler.compile_kernel(kernel, limits.target).resources
        spilled = sum(one.spill_bytes for one in resources.values())
        assert spilled <= (600 if isinstance(kernel, TokenProductsConfig) else 0)
