"""Ranks of kernels/all_reduce.cuh: processes that share memory, each of which runs the emulated kernel."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from emulator import EmulatorError, Range, build_variant, launch
from torch import Tensor

from fastattention.distributed.transports.all_reduce import (
    MOST_RANKS,
    PACKET_BYTES,
    AllReduceConfig,
    FlagLayout,
    make_params,
)
from fastattention.gpu_runtime.module import KernelLaunch

TIMEOUT = 30_000_000_000  # nanoseconds, for calls that every rank makes
GUARD = 64  # bytes that stay NaN, before and after what a call may write
MOST_BYTES = 1 << 28  # of shared memory, of which the system gives what is used


class AllReduceCall(NamedTuple):
    """One launch on every rank."""

    count: int
    num_ctas: int = 1
    one_shot: bool = False
    out_offset: int = 0  # in elements, from a multiple of 16 bytes
    late: int | None = None  # a rank that computes its part only when all others wait for it


class SharedMemory:
    """Memory that child processes share with this one, at the same addresses."""

    def __init__(self) -> None:
        self._bytes = torch.frombuffer(mmap.mmap(-1, MOST_BYTES), dtype=torch.uint8)
        self._taken = 0

    def take(self, count: int, dtype: torch.dtype) -> Tensor:
        """Elements whose bits are all set, NaN as floats, from a multiple of 64 bytes on."""
        nbytes = -(-count * dtype.itemsize // 64) * 64
        taken = self._bytes[self._taken : self._taken + nbytes].fill_(0xFF).view(dtype)[:count]
        self._taken += nbytes
        assert taken.numel() == count, "the memory is too small"
        return taken


class Rank:
    """The memory of one rank. Calls use `parts`, one after the other; these and results begin and end with GUARD."""

    def __init__(
        self, memory: SharedMemory, calls: Sequence[AllReduceCall], dtype: torch.dtype, first_step: int
    ) -> None:
        more = 2 * GUARD // dtype.itemsize + 8
        most = max(call.count for call in calls) + more
        self.flags = memory.take(FlagLayout.COUNT, torch.int32).fill_(first_step)
        self.parts = memory.take(most, dtype)
        self.computed = [memory.take(call.count, dtype).copy_(torch.randn(call.count)) for call in calls]
        self.parts_after = [memory.take(most, dtype) for _ in calls]
        self.outs = [memory.take(call.count + more, dtype) for call in calls]

    def compute(self, number: int) -> None:
        """Computes without torch, because a child process must use only addresses of tensors."""
        source = self.computed[number]
        ctypes.memmove(self.parts.data_ptr() + GUARD, source.data_ptr(), source.nbytes)

    def flag(self, number: int) -> int:
        return ctypes.c_int32.from_address(self.flags.data_ptr() + 4 * number).value


class Host:
    """As many ranks as a variant has, and the calls that they make."""

    def __init__(self, variant: AllReduceConfig, calls: Sequence[AllReduceCall], first_step: int = 0) -> None:
        """first_step: the first step of the flags, as if this many steps had been made before."""
        self.variant, self.calls, self.first_step = variant, calls, first_step
        memory = SharedMemory()
        self.ranks = [Rank(memory, calls, variant.dtype, first_step) for _ in range(variant.num_ranks)]

    def run(self, *ranks: int, timeout: int = TIMEOUT) -> list[str]:
        """All calls on some ranks, or all. Returns the error of each of these, '' for none."""
        build_variant(self.variant)
        children = [
            Child(lambda rank=rank: self._make_calls(rank, timeout)) for rank in ranks or range(len(self.ranks))
        ]
        return [child.complaint() for child in children]

    def _make_calls(self, rank: int, timeout: int) -> None:
        mine = self.ranks[rank]
        for number, call in enumerate(self.calls):
            ctypes.memset(mine.parts.data_ptr(), 0xFF, mine.parts.nbytes)
            if call.late == rank:
                self._await_others(rank)
            mine.compute(number)
            self._launch(rank, number, timeout)
            ctypes.memmove(mine.parts_after[number].data_ptr(), mine.parts.data_ptr(), mine.parts.nbytes)

    def _await_others(self, rank: int) -> None:
        """Waits until the first CTA of every other rank is one step ahead, or a timeout."""
        deadline, before = time.monotonic_ns() + TIMEOUT, self.ranks[rank].flag(FlagLayout.STEPS)
        for other in range(len(self.ranks)):
            while other != rank and self.ranks[rank].flag(FlagLayout.ARRIVALS + other) == before:
                if time.monotonic_ns() > deadline:
                    raise TimeoutError(f"rank {other} waits for no other")
                os.sched_yield()

    def _launch(self, rank: int, number: int, timeout: int) -> None:
        call, item = self.calls[number], self.variant.dtype.itemsize
        parts = tuple(each.parts.data_ptr() + GUARD for each in self.ranks)
        flags = tuple(each.flags.data_ptr() for each in self.ranks)
        params = make_params(parts, flags, rank, call.count, call.num_ctas, timeout, call.one_shot)
        params.out = self.ranks[rank].outs[number].data_ptr() + GUARD + item * call.out_offset
        nbytes = item * call.count
        ranges = [Range(part, -(-nbytes // PACKET_BYTES) * PACKET_BYTES) for part in parts]
        launch(KernelLaunch(self.variant, 0, call.num_ctas), params, [*ranges, Range(params.out, nbytes)])

    def check(self) -> None:
        """Every call has the right results on every rank, and has written nothing else."""
        guard = GUARD // self.variant.dtype.itemsize
        for number, call in enumerate(self.calls):
            computed = [rank.computed[number] for rank in self.ranks]
            expected = sum((part.float() for part in computed), torch.zeros(call.count)).to(self.variant.dtype)
            for index, rank in enumerate(self.ranks):
                what = f"{self.variant.name}, rank {index}, {call}"
                assert_holds(rank.outs[number], guard + call.out_offset, expected, f"out of {what}")
                mine = computed[index].clone()
                if not call.one_shot:
                    share = self._share_of(index, call.count)
                    mine[share] = expected[share]
                assert_holds(rank.parts_after[number], guard, mine, f"parts of {what}")
        for index, rank in enumerate(self.ranks):
            assert torch.equal(rank.flags, self._flags_after(index)), f"flags of rank {index}"

    def _share_of(self, rank: int, count: int) -> slice:
        """The elements that a rank adds up: whole packets."""
        of_packet = PACKET_BYTES // self.variant.dtype.itemsize
        packets = -(-count // of_packet)
        share = -(-packets // len(self.ranks)) * of_packet
        return slice(rank * share, min((rank + 1) * share, count))

    def _flags_after(self, rank: int) -> Tensor:
        """The flags of a rank: the steps of each CTA, and those of other ranks' CTAs with the same index."""
        flags = torch.full((FlagLayout.COUNT,), self.first_step, dtype=torch.int32)
        for call in self.calls:
            for cta in range(call.num_ctas):
                others = [cta * MOST_RANKS + other for other in range(len(self.ranks)) if other != rank]
                flags[[*others, FlagLayout.STEPS + cta]] += 2 if call.one_shot else 3
        return flags


def assert_holds(memory: Tensor, begin: int, values: Tensor, what: str) -> None:
    """Asserts that memory holds these values bit for bit, and its initial bits before and after them."""
    bits = {2: torch.int16, 4: torch.int32}[memory.itemsize]
    end = begin + values.numel()
    assert torch.equal(memory[begin:end].view(bits), values.view(bits)), what
    assert (memory[:begin].view(bits) == -1).all(), f"before {what}"
    assert (memory[end:].view(bits) == -1).all(), f"after {what}"


class Child:
    """A process that does one thing."""

    def __init__(self, task: Callable[[], None]) -> None:
        self._read, write = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                os.close(self._read)
                os.write(write, said_by(task).encode())
            finally:
                os._exit(0)
        os.close(write)

    def complaint(self) -> str:
        """The error of the process, once it has ended."""
        with os.fdopen(self._read) as pipe:
            said = pipe.read()
        os.waitpid(self._pid, 0)
        return "died" if not said else said.removeprefix("done")


def said_by(task: Callable[[], None]) -> str:
    """ "done", or the error that it ends with."""
    try:
        task()
    except EmulatorError as error:
        return str(error)
    except BaseException as error:
        return repr(error)
    return "done"
