"""Variants of kernels: names tell them apart, and C++ reads their parameters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest

from fastattention.backends.cuda.attention.variants import variants_of
from fastattention.gpu_runtime.chips import CHIPS
from fastattention.gpu_runtime.variant import Variant


@dataclass(frozen=True)
class Sample(Variant):
    include_folders: ClassVar = ()
    exports: ClassVar = ("rows", "bfloat16")
    constants: ClassVar = {"warps": 4}

    arch: int
    dtype: str
    tile_m: int
    tile_n: int
    num_stages: int = 2
    cache_format: str = ""
    drops: bool = False
    keeps_order: bool = False

    @property
    def source(self) -> str:
        return "sample.cuh"

    @property
    def rows(self) -> int:
        return 2 * self.tile_m

    @property
    def bfloat16(self) -> bool:
        return self.dtype == "bfloat16"


SAMPLE = Sample(80, "float16", 64, 32)
CHANGES = {
    "arch": 70, "dtype": "bfloat16", "tile_m": 32, "tile_n": 64, "num_stages": 0, "cache_format": "int8",
    "drops": True, "keeps_order": True,
}  # fmt: skip


def test_names_tell_all_fields_apart() -> None:
    variants = [SAMPLE, *(replace(SAMPLE, **{name: value}) for name, value in CHANGES.items())]  # type: ignore[arg-type]
    assert SAMPLE.name == "sample_sm80_float16_tm64_tn32"
    assert replace(SAMPLE, **CHANGES).name == "sample_sm70_bfloat16_tm32_tn64_ns0_int8_drops_ko"  # type: ignore[arg-type]
    assert len({variant.name for variant in variants}) == len(variants)


@pytest.mark.parametrize("chip", ["P100", "V100", "A100"])
def test_names_tell_all_kernels_of_a_chip_apart(chip: str) -> None:
    kernels = set(variants_of(CHIPS[chip], headdims=(64, 256)))
    assert len({kernel.name for kernel in kernels}) == len(kernels)


def test_numbers_exports_and_constants_are_members_of_config() -> None:
    declared = replace(SAMPLE, dtype="bfloat16", drops=True).declaration
    assert '#define FA_ARCH_HEADER "arch/sm80.cuh"' in declared
    members = [line.strip() for line in declared.splitlines() if "constexpr" in line]
    assert members == [
        "static constexpr int arch = 80;",
        "static constexpr int tile_m = 64;",
        "static constexpr int tile_n = 32;",
        "static constexpr int num_stages = 2;",
        "static constexpr bool drops = true;",
        "static constexpr bool keeps_order = false;",
        "static constexpr int warps = 4;",
        "static constexpr int rows = 128;",
        "static constexpr bool bfloat16 = true;",
    ]
