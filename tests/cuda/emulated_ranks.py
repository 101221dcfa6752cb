"""Ranks of kernels/all_reduce.cuh: processes that share memory, each of which runs the emulated kernel."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from emulator import EmulatorError, Range, build_variant, launch
from torch import Tensor

from fastattention.backends.cuda.all_reduce import PACKET_BYTES, Flags, Peers, all_reduce_params
from fastattention.backends.cuda.kernel_config import AllReduceConfig
from fastattention.backends.cuda.params import MOST_PARTS
from fastattention.gpu_runtime.module import KernelLaunch

PATIENCE = 30_000_000_000  # nanoseconds, where every rank comes
GUARD = 64  # bytes of NaN before and behind what a call may write


class Call(NamedTuple):
    """One launch on every rank."""

    ends: Sequence[int]
    num_ctas: int = 1
    whole: bool = False
    out_offset: int = 0  # of numbers, from a multiple of 16 bytes
    raised: Sequence[Sequence[int]] | None = None  # by rank: blocks as they are computed, while the kernel runs
    last: int | None = None  # a rank that computes a block when all others wait for it, one after the other

    @property
    def count(self) -> int:
        """Numbers of all blocks."""
        return self.ends[-1]


class SharedMemory:
    """Memory that child processes share with this one, at the same addresses."""

    def __init__(self, nbytes: int) -> None:
        self._bytes = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
        self._taken = 0

    def take(self, count: int, dtype: torch.dtype, value: float = torch.nan) -> Tensor:
        """Numbers, all of a value, from a multiple of 64 bytes on."""
        nbytes = -(-count * dtype.itemsize // 64) * 64
        taken = self._bytes[self._taken : self._taken + nbytes].view(dtype)[:count]
        self._taken += nbytes
        assert taken.numel() == count, "the memory is too small"
        return taken.fill_(value)


@dataclass
class Rank:
    """What one rank has. The first two are used by all calls, one after the other; each begins and ends with GUARD."""

    parts: Tensor
    out: Tensor
    flags: Tensor
    computed: list[Tensor] = field(default_factory=list)  # by call: what `parts` will hold
    parts_after: list[Tensor] = field(default_factory=list)  # `parts`, `out` and the flags when the kernel has ended
    out_after: list[Tensor] = field(default_factory=list)
    flags_after: list[Tensor] = field(default_factory=list)


class Host:
    """As many ranks as a variant has, and the calls that they make."""

    def __init__(self, variant: AllReduceConfig, calls: Sequence[Call], first_step: int = 0) -> None:
        """first_step: that the flags begin with, as if there had been so many before."""
        self.variant, self.calls = variant, calls
        self.dtype: torch.dtype = getattr(torch, variant.dtype)
        self.guard = GUARD // self.dtype.itemsize
        room = max(call.count for call in calls) + 2 * self.guard + 8
        counts = [max(call.count, 1) for call in calls]
        one = 2 * room + sum(2 * room + count for count in counts)
        flags = (len(calls) + 1) * (4 * Flags.COUNT + 64)
        memory = SharedMemory(variant.num_ranks * (self.dtype.itemsize * one + flags + 64 * (4 + 4 * len(calls))))
        self.ranks = [self._rank(memory, room, first_step) for _ in range(variant.num_ranks)]

    def _rank(self, memory: SharedMemory, room: int, first_step: int) -> Rank:
        flags = memory.take(Flags.COUNT, torch.int32, 0)
        flags[: Flags.FINISHED] = first_step
        rank = Rank(memory.take(room, self.dtype), memory.take(room, self.dtype), flags)
        for call in self.calls:
            rank.computed.append(memory.take(call.count, self.dtype).copy_(torch.randn(call.count)))
            rank.parts_after.append(memory.take(room, self.dtype))
            rank.out_after.append(memory.take(room, self.dtype))
            rank.flags_after.append(memory.take(Flags.COUNT, torch.int32, 0))
        return rank

    def run(self, ranks: Sequence[int] | None = None, patience: int = PATIENCE) -> list[str]:
        """All calls on some ranks, or all. Returns what each of these has to complain about, '' for nothing."""
        build_variant(self.variant)
        children = [
            Child(lambda rank=rank: self._make_calls(rank, patience)) for rank in ranks or range(len(self.ranks))
        ]
        return [child.complaint() for child in children]

    def _make_calls(self, rank: int, patience: int) -> None:
        mine = self.ranks[rank]
        for number, call in enumerate(self.calls):
            fill_with_ones(mine.parts)
            fill_with_ones(mine.out)
            step = self._flag(rank, Flags.STEPS)
            compute = threading.Thread(target=self._compute, args=(rank, number, step))
            compute.start()
            if call.raised is None:
                compute.join()
            self._launch(rank, call, patience)
            compute.join()
            for after, now in (
                (mine.parts_after, mine.parts),
                (mine.out_after, mine.out),
                (mine.flags_after, mine.flags),
            ):
                ctypes.memmove(after[number].data_ptr(), now.data_ptr(), now.nbytes)

    def _compute(self, rank: int, number: int, step: int) -> None:
        """What the stream of a rank does: writes the blocks, and says so. step: that the first CTA took last."""
        mine, call, item = self.ranks[rank], self.calls[number], self.dtype.itemsize
        for block in range(len(call.ends)) if call.raised is None else call.raised[rank]:
            if call.last == rank:
                self._await_others(rank, step + block * (1 if call.whole else 2) + 1)
            begin = call.ends[block - 1] if block else 0
            at = item * begin
            to, source = mine.parts.data_ptr() + GUARD, mine.computed[number].data_ptr()
            ctypes.memmove(to + at, source + at, item * (call.ends[block] - begin))
            if call.raised is not None:
                ctypes.c_int32.from_address(mine.flags.data_ptr() + 4 * (Flags.READY + block)).value = 1

    def _await_others(self, rank: int, step: int) -> None:
        """Until the first CTA of every other rank has come to a meeting, or long enough."""
        deadline = time.monotonic_ns() + PATIENCE
        for other in range(len(self.ranks)):
            while other != rank and self._flag(rank, other) < step and time.monotonic_ns() < deadline:
                os.sched_yield()

    def _flag(self, rank: int, number: int) -> int:
        return ctypes.c_int32.from_address(self.ranks[rank].flags.data_ptr() + 4 * number).value

    def _launch(self, rank: int, call: Call, patience: int) -> None:
        mine, item = self.ranks[rank], self.dtype.itemsize
        parts = tuple(other.parts.data_ptr() + GUARD for other in self.ranks)
        peers = Peers(rank, parts, tuple(other.flags.data_ptr() for other in self.ranks))
        out = mine.out.data_ptr() + GUARD + item * call.out_offset
        params = all_reduce_params(
            peers,
            out,
            tuple(call.ends),
            call.num_ctas,
            patience,
            awaits_blocks=call.raised is not None,
            whole=call.whole,
        )
        packets = -(-item * call.count // PACKET_BYTES)
        ranges = [Range(part, PACKET_BYTES * packets) for part in parts]
        launch(KernelLaunch(self.variant, 0, call.num_ctas), params, [*ranges, Range(out, item * call.count)])

    def check(self) -> None:
        """Every call has the right results on every rank, and has written nothing else."""
        for number, call in enumerate(self.calls):
            parts = [rank.computed[number] for rank in self.ranks]
            total = torch.zeros(call.count)
            for part in parts:
                total += part.float()
            expected = total.to(self.dtype)
            for index, rank in enumerate(self.ranks):
                what = f"{self.variant.name}, rank {index}, {call}"
                begin = self.guard + call.out_offset
                assert_holds(rank.out_after[number], begin, expected, f"out of {what}")
                mine = parts[index].clone()
                if not call.whole:
                    for first, end in shares_of(index, call.ends, len(parts), PACKET_BYTES // self.dtype.itemsize):
                        mine[first:end] = expected[first:end]
                assert_holds(rank.parts_after[number], self.guard, mine, f"parts of {what}")
                assert not rank.flags_after[number][Flags.FINISHED :].any(), f"flags of {what}"
                self._check_steps(index, number)

    def _check_steps(self, rank: int, number: int) -> None:
        """Arrivals, and steps, are the same: of all ranks, for CTAs that have run."""
        after = self.ranks[rank].flags_after[number]
        steps = after[Flags.STEPS :][: self.calls[number].num_ctas]
        arrivals = after[: Flags.STEPS].view(-1, MOST_PARTS)[: len(steps), : len(self.ranks)]
        others = [other for other in range(len(self.ranks)) if other != rank]
        # Another rank may be a step or more ahead by now: in its next call.
        assert ((arrivals[:, others].long() - steps[:, None].long()) % (1 << 32) < 100).all()


def shares_of(rank: int, ends: Sequence[int], num_ranks: int, of_packet: int) -> list[tuple[int, int]]:
    """The numbers of each block that a rank adds up: so many whole packets, from a packet's beginning on."""
    shares = []
    for begin, end in zip((0, *ends), ends, strict=False):
        first, last = begin // of_packet, -(-end // of_packet)
        packets = -(-(last - first) // num_ranks)
        mine = first + rank * packets
        shares.append((max(mine * of_packet, begin), max(min((mine + packets) * of_packet, end), begin)))
    return shares


def fill_with_ones(memory: Tensor) -> None:
    """Of bits: NaN. Without torch, of which a child process must not use more than addresses."""
    ctypes.memset(memory.data_ptr(), 0xFF, memory.nbytes)


def assert_holds(memory: Tensor, begin: int, values: Tensor, what: str) -> None:
    """Bit for bit these numbers, and NaN before and behind them."""
    bits = {2: torch.int16, 4: torch.int32}[memory.itemsize]
    end = begin + values.numel()
    assert torch.equal(memory[begin:end].view(bits), values.view(bits)), what
    assert (memory[:begin].view(bits) == -1).all(), f"before {what}"
    assert (memory[end:].view(bits) == -1).all(), f"behind {what}"


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
        """What it complains about, when it has ended."""
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
