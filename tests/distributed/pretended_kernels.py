"""The kernels by which transports sum, as operations of pretended streams: on addresses in this process, by ctypes."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastattention.backends.cuda.params import MOST_PARTS, AllReduceParams

PATIENCE = 20.0  # seconds until what waits is taken to wait for ever


def flag_at(address: Any) -> ctypes.c_uint32:
    return ctypes.c_uint32.from_address(int(address))


def numbers_at(address: int, count: int, dtype: torch.dtype) -> Tensor:
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype, count=count)


def await_flag(address: Any, value: int) -> None:
    """Until it is this or has come after it, modulo 2^32."""
    flag, deadline = flag_at(address), time.monotonic() + PATIENCE
    while (flag.value - value) % 2**32 >= 2**31:
        if time.monotonic() > deadline:
            raise TimeoutError("a flag is never raised")
        time.sleep(0)


def sum_parts(parts: Sequence[int], shared: int, out: int, count: int, dtype: torch.dtype) -> None:
    """kernels/sum_parts.cuh."""
    total = sum((numbers_at(part, count, dtype).float() for part in parts), torch.zeros(count)).to(dtype)
    numbers_at(shared, count, dtype).copy_(total)
    numbers_at(out, count, dtype).copy_(total)


class AllReduce:
    """kernels/all_reduce.cuh. Its CTAs run side by side, one step after the other."""

    def __init__(self, params: AllReduceParams, dtype: torch.dtype, num_ranks: int) -> None:
        self.params, self.dtype, self.num_ranks = params, dtype, num_ranks
        self.steps = [flag_at(params.steps + 4 * cta) for cta in range(params.num_ctas)]
        self.step = [step.value for step in self.steps]

    def run(self) -> None:
        params, begin = self.params, 0
        for block in range(params.num_blocks):
            end = params.ends[block]
            if params.ready:
                await_flag(params.ready + 4 * block, 1)
            self.meet()
            if params.whole:
                self.add_up(begin, end)
            else:
                mine = self.share_of(params.rank, begin, end)
                self.add_up(*mine)
                self.meet()
                self.collect(begin, end)
            begin = end
        self.meet()
        for stored, step in zip(self.steps, self.step, strict=True):
            stored.value = step
        for block in range(params.num_blocks if params.ready else 0):
            flag_at(params.ready + 4 * block).value = 0
        assert flag_at(params.finished).value == 0

    def meet(self) -> None:
        """Of CTA i with CTAs i of the others, for all of them."""
        params, others = self.params, [rank for rank in range(self.num_ranks) if rank != self.params.rank]
        for cta in range(params.num_ctas):
            self.step[cta] = (self.step[cta] + 1) % 2**32
            for other in others:
                flag_at(params.arrivals[other] + 4 * (cta * MOST_PARTS + params.rank)).value = self.step[cta]
        for cta in range(params.num_ctas):
            for other in others:
                await_flag(params.arrivals[params.rank] + 4 * (cta * MOST_PARTS + other), self.step[cta])

    def share_of(self, rank: int, begin: int, end: int) -> tuple[int, int]:
        """In numbers; it begins and ends with packets of 16 bytes, or with the block."""
        numbers = 16 // self.dtype.itemsize
        first, last = begin // numbers, -(-end // numbers)
        share = -(-(last - first) // self.num_ranks)
        bounds = [min(max((first + share * count) * numbers, begin), end) for count in (rank, rank + 1)]
        return bounds[0], bounds[1]

    def add_up(self, begin: int, end: int) -> None:
        parts = [self.memory(self.params.parts[rank], begin, end) for rank in range(self.num_ranks)]
        total = sum((part.float() for part in parts), torch.zeros(end - begin)).to(self.dtype)
        self.memory(self.params.out, begin, end).copy_(total)
        if not self.params.whole:
            parts[self.params.rank].copy_(total)

    def collect(self, begin: int, end: int) -> None:
        for rank in range(self.num_ranks):
            if rank != self.params.rank:
                share = self.share_of(rank, begin, end)
                self.memory(self.params.out, *share).copy_(self.memory(self.params.parts[rank], *share))

    def memory(self, base: int, begin: int, end: int) -> Tensor:
        if begin == end:
            return torch.zeros(0, dtype=self.dtype)
        return numbers_at(base + begin * self.dtype.itemsize, end - begin, self.dtype)
