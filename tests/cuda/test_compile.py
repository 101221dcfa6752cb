"""NVRTC compiles kernels for their own code path, without a GPU, and the kernels fit their registers."""

from __future__ import annotations

import dataclasses
import functools
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import kernel_resources
import pytest
import torch
from tiers import deep, sampled, slow

from fastattention.backends.cuda.attention.config import (
    AppendConfig,
    BackwardConfig,
    DeltaConfig,
    KernelConfig,
    MergeConfig,
)
from fastattention.backends.cuda.attention.variants import (
    HEADDIMS,
    UNQUANTIZED,
    Feature,
    choose_decode_variant,
    choose_variant,
    training_variants_of,
    variants_of,
)
from fastattention.backends.cuda.common.arch import MAX_REGISTERS
from fastattention.backends.cuda.linear.step_config import step_variants
from fastattention.distributed.transports.all_reduce import MOST_RANKS, AllReduceConfig, usual_configs
from fastattention.errors import CompileError
from fastattention.gpu_runtime import compiler
from fastattention.gpu_runtime.chips import CHIPS
from fastattention.gpu_runtime.variant import Variant

REASON = compiler.why_unavailable()
pytestmark = [slow, pytest.mark.skipif(REASON is not None, reason=str(REASON))]


# There are many decodes. Other head dimensions, the other dtype and float8 take no more registers. The emulator
# compiles all.
DECODED = (Feature.PLAIN, Feature.PAGED, Feature.INT8)


def kernels_of(chip: str) -> list[Variant]:
    """Forwards and backwards of a GPU, and those of its other kernels that take the most."""
    limits = CHIPS[chip]
    dtype = torch.bfloat16 if limits.arch >= 80 else torch.float16
    all_forwards = variants_of(limits, HEADDIMS, features=UNQUANTIZED)
    forwards = [kernel for kernel in all_forwards if kernel.source == "forward.cuh"]
    training = training_variants_of(limits, HEADDIMS, (dtype,))
    return list(dict.fromkeys([*forwards, *training, *variants_of(limits, (128,), (dtype,), features=DECODED)]))


measure = functools.cache(kernel_resources.measure)


def usages_of(chip: str) -> list[Any]:
    """kernel_resources.measure for kernels of a GPU; the compiler releases Python's lock."""
    arch = CHIPS[chip].arch
    if (reason := compiler.why_not_target(arch)) is not None:
        pytest.skip(reason)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(lambda kernel: measure(kernel, arch), kernels_of(chip)))


def spills(usages: list[Any]) -> dict[str, int]:
    return {usage.kernel.name: usage.spill_bytes for usage in usages if usage.spill_bytes}


# Head dimension up to which kernels spill no register. Page indices are read once a tile, and may be spilled. On a V100
# decodes read a few spilled words once a tile, most of them outside the main loop.
FORWARDS_SPILL_NOTHING = {"V100": 256, "T4": 192, "A100": 256, "RTX 3090": 256}
DECODES_SPILL_NOTHING = {"P100": 128, "T4": 128, "A100": 128, "RTX 3090": 128}
MOST_FOR_PAGES = 48  # bytes
MOST_OF_SCORES = 64  # bytes, for what is added to scores: on an H100 smaller tiles, which spill nothing, took longer
MOST_OF_PRODUCTS = 48  # bytes, for int8: each row has a factor of its own
MOST_OF_TRAINING = 144  # bytes, for backwards and dropout up to headdim 128: gradients of rows take most registers
MOST_OF_QUANTIZED = 16  # bytes, for decodes of int8 pages with every rule of scores and masks at once


@deep
@pytest.mark.parametrize("chip", kernel_resources.CHIP_NAMES)
def test_kernels_compile_and_spill_next_to_nothing(chip: str) -> None:
    """One test for each chip, whose kernels are compiled once."""
    usages = usages_of(chip)
    for usage in usages:
        assert usage.resources.keys() == {entry.name for entry in usage.kernel.entries}
        assert all(0 < resources.registers <= MAX_REGISTERS for resources in usage.resources.values())
        assert usage.code_bytes > (2_000 if isinstance(usage.kernel, DeltaConfig) else 5_000)
    attending = [usage for usage in usages if isinstance(usage.kernel, KernelConfig)]
    decodes = [usage for usage in attending if usage.kernel.decodes]
    forwards = [usage for usage in attending if not usage.kernel.decodes and not usage.kernel.drops]
    backwards = [usage for usage in usages if isinstance(usage.kernel, BackwardConfig)]
    assert len(backwards) >= 6 * len(HEADDIMS)  # plain, scores, dropout; of queries, and of keys and values
    training = [*backwards, *(usage for usage in attending if usage.kernel.drops)]
    narrow = [usage for usage in training if max(usage.kernel.headdim, usage.kernel.headdim_v) <= 128]
    assert max(spills(narrow).values(), default=0) <= MOST_OF_TRAINING
    assert len(forwards) >= 3 * len(HEADDIMS)  # plain, scores, pages
    assert len(decodes) >= len(DECODED)
    for kernels, most in (
        (forwards, FORWARDS_SPILL_NOTHING.get(chip, 0)),
        (decodes, DECODES_SPILL_NOTHING.get(chip, 0)),
    ):
        held = [usage for usage in kernels if usage.kernel.headdim <= most]
        paged = [usage for usage in held if usage.kernel.paged]
        products = [usage for usage in held if usage.kernel.int8_products]
        quantized = [usage for usage in held if usage.kernel.cache_format and usage.kernel.decodes]
        adding = [usage for usage in held if usage.kernel.has_alibi or usage.kernel.has_bias]
        others = [usage for usage in held if usage not in (*paged, *products, *quantized, *adding)]
        assert spills(others) == {}
        assert max(spills(paged).values(), default=0) <= MOST_FOR_PAGES
        assert max(spills(adding).values(), default=0) <= MOST_OF_SCORES
        assert max(spills(products).values(), default=0) <= MOST_OF_PRODUCTS
        assert max(spills(quantized).values(), default=0) <= MOST_OF_QUANTIZED


@pytest.mark.parametrize("headdim", [64, 128])
def test_the_most_usual_kernels_of_a_v100_spill_next_to_nothing(headdim: int) -> None:
    """A forward and the kernels of gradients without any rule of scores."""
    limits = CHIPS["V100"]
    if (reason := compiler.why_not_target(limits.target)) is not None:
        pytest.skip(reason)
    training = training_variants_of(limits, (headdim,), (torch.float16,))
    backwards = [one for one in training if isinstance(one, BackwardConfig)]
    plain = [one for one in backwards if not (one.drops or one.block_sparse or any(one.rules))]
    forward = choose_variant(limits.arch, limits, torch.float16, headdim, headdim)
    assert len(plain) >= 2
    assert spills([measure(forward, limits.target)]) == {}
    assert max(spills([measure(one, limits.target) for one in plain]).values(), default=0) <= 8  # bytes


@pytest.mark.parametrize("chip", [pytest.param(chip, marks=() if chip == "V100" else deep) for chip in CHIPS])
def test_a_merge_or_an_all_reduce_spills_nothing(chip: str) -> None:
    target = CHIPS[chip].target
    if (reason := compiler.why_not_target(target)) is not None:
        pytest.skip(reason)
    merges = [kernel for kernel in variants_of(CHIPS[chip], (64,)) if isinstance(kernel, MergeConfig)]
    assert len(merges) == 7
    assert spills([measure(kernel, target) for kernel in (*merges, *usual_configs(CHIPS[chip]))]) == {}


@sampled
@pytest.mark.parametrize("chip", ["V100", *(pytest.param(chip, marks=deep) for chip in ("P100", "T4", "A100", "H100"))])
@pytest.mark.parametrize("kernel", step_variants(), ids=lambda kernel: kernel.name)
def test_a_step_of_linear_attention_spills_nothing(kernel: Variant, chip: str) -> None:
    target = CHIPS[chip].target
    if (reason := compiler.why_not_target(target)) is not None:
        pytest.skip(reason)
    assert spills([measure(kernel, target)]) == {}


def test_bulk_copies_compile_from_hopper_on() -> None:
    """Older targets give an error, rather than machine code without them."""
    kernel = AllReduceConfig(torch.float16, 4, bulk_copies=True)
    for target in (80, 89):
        with pytest.raises(CompileError, match=rf"{kernel.name} does not compile for sm_{target}"):
            compiler.compile_kernel(kernel, target)
    assert compiler.compile_kernel(kernel, 90).resources.keys() == {"fastattention_all_reduce"}


@sampled
@pytest.mark.parametrize("num_ranks", range(2, MOST_RANKS + 1))
@pytest.mark.parametrize("bulk_copies", [False, True], ids=["registers", "bulk"])
def test_all_reduce_compiles_for_every_number_of_ranks(num_ranks: int, bulk_copies: bool) -> None:
    usage = measure(AllReduceConfig(torch.bfloat16, num_ranks, bulk_copies), 90)
    assert usage.spill_bytes == 0
    assert usage.resources.keys() == {entry.name for entry in usage.kernel.entries}


def test_every_code_path_is_reported() -> None:
    assert {CHIPS[chip].arch for chip in kernel_resources.CHIP_NAMES} == {limits.arch for limits in CHIPS.values()}


def test_a_row_has_the_first_entry_and_the_spills_of_all() -> None:
    kernel = choose_decode_variant(75, CHIPS["T4"], torch.float16, 32, 32)
    resources = {
        "fastattention_decode": compiler.Resources(200, 16, 8),
        "fastattention_combine": compiler.Resources(80, 4, 0),
    }
    cells = kernel_resources.cells(kernel_resources.Usage(kernel, 75, resources, 40_000))
    assert cells == [kernel.name, "7.5", "128", "200", "20", f"{kernel.shared_bytes}", "40000"]


@pytest.mark.parametrize(
    "kernel",
    [
        choose_variant(75, CHIPS["T4"], torch.float16, 32, 32),
        choose_decode_variant(75, CHIPS["T4"], torch.bfloat16, 32, 32, (Feature.INT8,)),
        AppendConfig(torch.bfloat16, "float8"),
        MergeConfig(torch.bfloat16, torch.float32),
        AllReduceConfig(torch.bfloat16, 4, bulk_copies=False),
    ],
    ids=["forward", "decode", "append", "merge", "all_reduce"],
)
def test_machine_code_is_of_the_kernel(kernel: Variant) -> None:
    """The compiler also gives no warning."""
    cubin = compiler.compile_kernel(kernel, 75)
    assert cubin.code.startswith(b"\x7fELF")
    assert all(entry.name.encode() in cubin.code for entry in kernel.entries)
    assert cubin.resources.keys() == {entry.name for entry in kernel.entries}
    assert "warning" not in cubin.log


def test_a_kernel_that_does_not_compile_gives_the_log() -> None:
    kernel = dataclasses.replace(choose_variant(75, CHIPS["T4"], torch.float16, 32, 32), tile_m=100)
    with pytest.raises(CompileError, match=rf"(?s){kernel.name} does not compile for sm_75:.*share the rows evenly"):
        compiler.compile_kernel(kernel, 75)


@pytest.mark.parametrize(
    ("target", "advice"),
    [(35, "CUDA 12 is the last that builds for Pascal and Volta"), (999, "a newer NVRTC may")],
    ids=["older", "newer"],
)
def test_a_gpu_that_the_compiler_does_not_know_is_refused_with_versions(target: int, advice: str) -> None:
    major, minor = compiler.version()
    with pytest.raises(CompileError, match=f"NVRTC {major}.{minor} builds for .*, not {target}; {advice}"):
        compiler.compile_kernel(AppendConfig(torch.float16), target)
