"""ConvolutionConfig and ConvolutionBackwardConfig: the variants of the kernels. C++ reads its constants from them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from fastattention.backends.cuda.common.arch import COMMON_FOLDERS
from fastattention.backends.cuda.common.tiles import Elements
from fastattention.convolution.problem import WIDTHS
from fastattention.gpu_runtime.variant import Entry, Variant

WARPS = (1, 4)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class _FilterVariant(Elements, Variant):
    """What both passes have in common. Filters and states may have any dtype."""

    include_folders: ClassVar = (Path(__file__).parent / "kernels", *COMMON_FOLDERS)
    thread_channels: ClassVar = 4  # kernels/filters.cuh reads and writes as many at a time

    dtype: torch.dtype  # dtype of x and out
    width: int
    num_warps: int

    @property
    def cta_channels(self) -> int:
        """Channels of a CTA."""
        return self.thread_channels * 32 * self.num_warps


@dataclass(frozen=True)
class ConvolutionConfig(_FilterVariant):
    """One variant of kernels/convolution.cuh, for calls and updates."""

    source: ClassVar[str] = "convolution.cuh"

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Its one function."""
        return (Entry("fastattention_convolution", self.num_warps, 0, overlaps=True),)


@dataclass(frozen=True)
class ConvolutionBackwardConfig(_FilterVariant):
    """One variant of kernels/convolution_backward.cuh."""

    source: ClassVar[str] = "convolution_backward.cuh"

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Gradients from ranges of tokens, and the sum of those of weights and bias over all ranges."""
        return (
            Entry("fastattention_convolution_backward", self.num_warps, 0),
            Entry("fastattention_convolution_sums", self.num_warps, 0),
        )


def convolution_variants(dtypes: Iterable[torch.dtype] = DTYPES) -> list[Variant]:
    """Every variant that calls ask for, to compile them ahead, inspect or test them."""
    fields = list(itertools.product(dtypes, WIDTHS, WARPS))
    return [kind(*each) for kind in (ConvolutionConfig, ConvolutionBackwardConfig) for each in fields]
