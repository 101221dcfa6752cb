"""Launches kernels/all_reduce.cuh, the all-reduce over the GPUs of one host: flags and parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fastattention.backends.cuda.kernel_config import ALL_REDUCE_WARPS, AllReduceConfig
from fastattention.backends.cuda.merging import DTYPE_NAMES
from fastattention.backends.cuda.params import MOST_BLOCKS, MOST_PARTS, AllReduceParams
from fastattention.gpu_runtime.module import KernelLaunch

MOST_CTAS = 64
PACKET_BYTES = 16  # that a thread reads at a time


class Flags:
    """Numbers of a rank's flags, of 32 bits each and 0 at first."""

    ARRIVALS = 0
    STEPS = ARRIVALS + MOST_CTAS * MOST_PARTS
    FINISHED = STEPS + MOST_CTAS
    READY = FINISHED + 1  # of each block: this rank's stream has computed it
    COUNT = READY + MOST_BLOCKS


@dataclass(frozen=True)
class Peers:
    """Addresses in the memory of all ranks, as this one reaches them."""

    rank: int
    parts: tuple[int, ...]  # by rank: of what it has computed, multiples of PACKET_BYTES
    flags: tuple[int, ...]  # by rank

    @property
    def pointers(self) -> tuple[tuple[int, ...], tuple[int, int, int]]:
        """Of AllReduceParams: those before `out`, and `ready` with those behind it."""
        unused = (0,) * (MOST_PARTS - len(self.parts))
        mine = self.flags[self.rank]
        own = mine + 4 * Flags.READY, mine + 4 * Flags.STEPS, mine + 4 * Flags.FINISHED
        return (*self.parts, *unused, *self.flags, *unused), own


@functools.lru_cache(maxsize=256)
def all_reduce_launch(dtype: torch.dtype, num_ranks: int, num_ctas: int, bulk_copies: bool) -> KernelLaunch:
    """The launch of so many CTAs, the same on all ranks."""
    return KernelLaunch(AllReduceConfig(DTYPE_NAMES[dtype], num_ranks, bulk_copies), 0, num_ctas)


def all_reduce_params(
    peers: Peers,
    out: int,
    ends: tuple[int, ...],
    num_ctas: int,
    patience: int,
    *,
    awaits_blocks: bool = False,
    whole: bool = False,
) -> AllReduceParams:
    """Its parameters.

    out: address of the result.
    ends: of up to MOST_BLOCKS blocks, in numbers from the beginning of the call.
    patience: nanoseconds for which a rank waits for another.
    awaits_blocks: each block for its flag; otherwise all have been computed.
    whole: every rank adds up everything, in the place of its share.
    """
    unused = (0,) * (MOST_BLOCKS - len(ends))
    template = AllReduceParams.template(*ends, *unused, patience, num_ctas, len(ends), peers.rank, int(whole))
    before, (ready, *behind) = peers.pointers
    params = AllReduceParams.make(template, *before, out, ready if awaits_blocks else 0, *behind)
    assert isinstance(params, AllReduceParams)
    return params


def ctas_for(nbytes: int, num_ranks: int, at_most: int, whole: bool) -> int:
    """CTAs that have something to do, where each thread takes a packet of every rank at a time."""
    packets = -(-nbytes // PACKET_BYTES)
    of_a_rank = packets if whole else -(-packets // num_ranks)
    return max(min(at_most, -(-of_a_rank // (32 * ALL_REDUCE_WARPS))), 1)


def launcher(launch: KernelLaunch, params: AllReduceParams, device_index: int) -> Callable[[int], None]:
    """What enqueues it on a stream, with the parameters as they are then. The device must be the current one."""
    return functools.partial(launch.function(device_index).launch, params, launch.num_ctas)
