"""What the ways to make a call really take: each is run a few times on all ranks, and the fastest is taken.

Predictions choose the blocks; whether these are worth it, launches and all, only a trial tells. The serial way is among
the candidates, so that no call is slower than it by more than noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch.distributed import ProcessGroup

from fastattention.distributed.blocks import AttentionLinear
from fastattention.distributed.exchange import largest
from fastattention.distributed.plan import LEAST_GAIN
from fastattention.distributed.tiled_allreduce import tiled_allreduce
from fastattention.distributed.timing import called_seconds, queued_seconds
from fastattention.distributed.transports import Transfer, Transport

ROUNDS = 5
CALLS = 2  # in a row, as the layers of a model come


class Candidate(NamedTuple):
    """Rows of each block, and who sums them."""

    rows: tuple[int, ...]
    transport: Transport


class Winners(NamedTuple):
    """The fastest candidate of a call, by its place: as it is called, and as a CUDA graph replays it."""

    called: int
    captured: int


def run_trials(
    candidates: Sequence[Candidate], call: AttentionLinear, transfer: Transfer, group: ProcessGroup
) -> Winners:
    """The fastest candidates; others than the first must gain LEAST_GAIN. Collective; the same on all ranks.

    Takes the memory of a second result.
    """
    out = call.inputs.q.new_empty(transfer.rows, transfer.hidden)
    seconds: list[float] = []
    for candidate in candidates:
        work = partial(_run, call, out, candidate)
        seconds.append(called_seconds(work, transfer.device, rounds=ROUNDS))
        seconds.append(queued_seconds(work, transfer.device, rounds=ROUNDS))
    seconds = largest(seconds, transfer.device, group)
    return Winners(_fastest(seconds[0::2]), _fastest(seconds[1::2]))


def _run(call: AttentionLinear, out: torch.Tensor, candidate: Candidate) -> None:
    for _ in range(CALLS):
        tiled_allreduce(call.compute, out, candidate.rows, candidate.transport)


def _fastest(seconds: Sequence[float]) -> int:
    best = min(range(1, len(seconds)), key=seconds.__getitem__)
    return best if seconds[best] < (1.0 - LEAST_GAIN) * seconds[0] else 0
