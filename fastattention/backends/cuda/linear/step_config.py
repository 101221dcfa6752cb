"""StepConfig: the variants of the kernel that goes token by token. C++ reads its constants from them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from fastattention.backends.cuda.common.arch import COMMON_FOLDERS
from fastattention.backends.cuda.common.tiles import Elements
from fastattention.gpu_runtime.variant import Entry, Variant

STEP_COLUMNS = (16, 32)
STEP_WARPS = (1, 2, 4, 8)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class StepConfig(Elements, Variant):
    """One variant of kernels/step.cuh, for every rule with these gates, which may be of any dtype."""

    include_folders: ClassVar = (Path(__file__).parent / "kernels", *COMMON_FOLDERS)
    source: ClassVar[str] = "step.cuh"
    warp_rows: ClassVar = 32  # of a state

    dtype: torch.dtype  # dtype of q, k, v and out
    gate_per_key: bool
    allows_delta: bool  # whether calls may use the delta rule; with gates of heads, they always may
    columns: int  # columns of a state that a CTA takes; a lane holds as many elements
    num_warps: int  # warps that share out the rows

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA, for sums of rows that warps exchange; kernels/step.cuh asserts the same."""
        products = 1 + self.allows_delta  # sums of each column
        fours = products * self.columns // 4 + 1  # groups of four sums of a warp, with one that belongs to no column
        return 2 * self.num_warps * fours * 16 if self.num_warps > 1 else 0

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Its one function."""
        return (Entry("fastattention_linear_step", self.num_warps, self.shared_bytes, overlaps=True),)


def step_variants(dtypes: Iterable[torch.dtype] = DTYPES) -> list[StepConfig]:
    """Every variant that calls ask for, to compile them ahead, inspect or test them."""
    rules = (False, True), (True, False), (True, True)
    each = itertools.product(dtypes, rules, STEP_COLUMNS, STEP_WARPS)
    return [StepConfig(dtype, *rule, columns, num_warps) for dtype, rule, columns, num_warps in each]
