"""Variants of kernels: names tell them apart."""

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
