"""Launches kernels/all_reduce.cuh: its variants, flags and parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from fastattention.backends.common.c_struct import Params, constants_of, params_of
from fastattention.backends.cuda.common.arch import COMMON_FOLDERS
from fastattention.backends.cuda.common.tiles import Elements
from fastattention.gpu_runtime.chips import Limits
from fastattention.gpu_runtime.variant import Entry, Variant

_KERNELS = Path(__file__).parents[1] / "kernels"
AllReduceParams = params_of(_KERNELS / "all_reduce_params.h", "AllReduceParams")
MOST_RANKS = constants_of(_KERNELS / "all_reduce_params.h")["kMostRanks"]
WARPS = 16  # warps of a CTA
MOST_CTAS = 64
PACKET_BYTES = 16  # bytes that a thread reads at a time
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FIRST_WITH_BULK_COPIES = 90  # compute capability


@dataclass(frozen=True)
class AllReduceConfig(Elements, Variant):
    """One variant of kernels/all_reduce.cuh."""

    include_folders: ClassVar = (_KERNELS, *COMMON_FOLDERS)
    source: ClassVar[str] = "all_reduce.cuh"
    num_warps: ClassVar = WARPS

    dtype: torch.dtype
    num_ranks: int
    bulk_copies: bool

    @property
    def packets_at_once(self) -> int:
        """Packets of a rank that a thread reads between two barriers of bulk copies."""
        return 2 if self.num_ranks <= 4 else 1

    @property
    def num_stages(self) -> int:
        """Bulk copies of all ranks that fit shared memory."""
        return 24 // (self.packets_at_once * self.num_ranks)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA; kernels/peer_reads.cuh asserts the same."""
        stage = self.num_ranks * self.packets_at_once * PACKET_BYTES * 32 * WARPS + 8
        return self.num_stages * stage if self.bulk_copies else 0

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Its one function."""
        return (Entry("fastattention_all_reduce", WARPS, self.shared_bytes),)


def choose_config(dtype: torch.dtype, num_ranks: int, limits: Limits) -> AllReduceConfig:
    """The variant for a GPU: with bulk copies, where the GPU has them and enough shared memory."""
    bulk = AllReduceConfig(dtype, num_ranks, bulk_copies=True)
    if limits.target >= FIRST_WITH_BULK_COPIES and bulk.shared_bytes <= limits.shared_per_cta:
        return bulk
    return AllReduceConfig(dtype, num_ranks, bulk_copies=False)


def usual_configs(limits: Limits, dtypes: Iterable[torch.dtype] = DTYPES) -> Iterator[AllReduceConfig]:
    """Variants for the usual numbers of GPUs, to compile ahead. Others are compiled when they are needed.

    dtypes: those besides float32, which sums of float32 partial results need
    """
    chosen = dict.fromkeys((torch.float32, *dtypes))
    return (choose_config(dtype, num_ranks, limits) for dtype in chosen for num_ranks in (2, 4, 8))


class FlagLayout:
    """Indices of a rank's flags, of 32 bits each and 0 at first."""

    ARRIVALS = 0
    STEPS = ARRIVALS + MOST_CTAS * MOST_RANKS
    COUNT = STEPS + MOST_CTAS


def make_params(
    parts: tuple[int, ...], flags: tuple[int, ...], rank: int, count: int, num_ctas: int, timeout: int, one_shot: bool
) -> Params:
    """Parameters of a launch; `out`, the address of the result, is left to be set.

    parts, flags: addresses by rank, as this one reaches them: multiples of PACKET_BYTES, and FlagLayout
    timeout: nanoseconds for which a rank waits for another
    one_shot: every rank adds up all rows, instead of its share
    """
    unused = (0,) * (MOST_RANKS - len(parts))
    return AllReduceParams.make(
        AllReduceParams.template(count=count, timeout=timeout, num_ctas=num_ctas, rank=rank, one_shot=one_shot),
        parts=(*parts, *unused),
        arrivals=(*flags, *unused),
        steps=flags[rank] + 4 * FlagLayout.STEPS,
    )


def ctas_for(nbytes: int, num_ranks: int, at_most: int, one_shot: bool) -> int:
    """CTAs that have work, where each thread takes a packet of every rank at a time."""
    packets = -(-nbytes // PACKET_BYTES)
    of_a_rank = packets if one_shot else -(-packets // num_ranks)
    return max(min(at_most, -(-of_a_rank // (32 * WARPS))), 1)
