"""StepConfig: the variants of the kernel that goes token by token, and their macros."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from fastattention.backends.cuda.common.arch import COMMON_FOLDERS
from fastattention.gpu_runtime.variant import Entry

STEP_COLUMNS = (16, 32)
STEP_WARPS = (1, 2, 4, 8)
WARP_ROWS = 32  # of a state; kernels/step.cuh says the same
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class StepConfig:
    """One variant of kernels/step.cuh, for both rules and gates of every dtype."""

    include_folders: ClassVar = (Path(__file__).parent / "kernels", *COMMON_FOLDERS)
    source: ClassVar = "step.cuh"

    dtype: torch.dtype  # of q, k, v and out
    gate_per_key: bool
    columns: int  # of a state, that a CTA takes; a lane holds as many numbers
    num_warps: int  # that share out the rows

    @property
    def name(self) -> str:
        """A readable name, unique among variants."""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"linear_step_{dtype}{'_keygates' * self.gate_per_key}_c{self.columns}w{self.num_warps}"

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA, for sums of rows that warps exchange; kernels/step.cuh asserts the same."""
        products = 1 if self.gate_per_key else 2  # of each column; only gates of heads meet the delta rule
        fours = products * self.columns // 4 + 1  # of a warp: with those that belong to no column
        return 2 * self.num_warps * fours * 16 if self.num_warps > 1 else 0

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Its one function."""
        return (Entry("fastattention_linear_step", 32 * self.num_warps, self.shared_bytes, overlaps=True),)

    def macros(self) -> dict[str, str]:
        """What it and the headers of backends/cuda that it includes are compiled with."""
        return {
            "FA_BFLOAT16": str(int(self.dtype is torch.bfloat16)),
            "FA_FLOAT32": str(int(self.dtype is torch.float32)),
            "FA_GATE_PER_KEY": str(int(self.gate_per_key)),
            "FA_CACHE_FORMAT": "0",
            "FA_COLUMNS": str(self.columns),
            "FA_WARPS": str(self.num_warps),
            "FA_SHARED_BYTES": str(self.shared_bytes),
        }


def step_variants(dtypes: Iterable[torch.dtype] = DTYPES) -> list[StepConfig]:
    """Every variant that calls ask for, to compile them ahead, inspect or test them."""
    return [StepConfig(*each) for each in itertools.product(dtypes, (False, True), STEP_COLUMNS, STEP_WARPS)]
