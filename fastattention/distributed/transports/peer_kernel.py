"""peer_kernel: one kernel of few CTAs reads what all ranks have computed, adds it up, and reads the others' sums.

It is launched once for all blocks of a call, when the last of them has been enqueued, and runs on a stream of its own
from the end of the first. The stream of the compute tells it by flags in memory which blocks are computed. So no block
waits until a matrix product leaves a multiprocessor to a kernel that sums: the few that this one has are taken once.
Nor does it wait for anything that the host has yet to do. NVLink's multicast is not used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fastattention.backends.cuda import all_reduce
from fastattention.backends.cuda.all_reduce import (
    Flags,
    Peers,
    all_reduce_launch,
    all_reduce_params,
    ctas_for,
)
from fastattention.backends.cuda.kernel_config import all_reduce_config
from fastattention.backends.cuda.params import MOST_BLOCKS, AllReduceParams
from fastattention.distributed.exchange import gather, timeout_of
from fastattention.distributed.transports.base import BlockTransport, Pending, Room
from fastattention.distributed.transports.on_one_host import OnOneHost
from fastattention.gpu_runtime import module
from fastattention.gpu_runtime.peer_memory import PeerMemory
from fastattention.gpu_runtime.streams import FlagWrites

# Through registers a multiprocessor reads some 10 GB/s of its peers, by bulk copies 40. On Hopper 8 of them saturate
# the links where nothing else runs, and products that leave 8 free run as if alone. 12 are slowed down less by what
# runs beside them, but there is no number that products could leave them without loss.
ROOMS, CTAS_ALONE = (Room(16, 16),), 64
BULK_ROOMS, BULK_CTAS_ALONE = (Room(8, 8), Room(12, 0)), 16
LONGEST_PATIENCE = 1e9  # seconds: their nanoseconds fit 64 bits
WHOLE_BYTES = 256 << 10  # up to which every rank adds up everything
MOST_PREPARED = 256


class PeerKernel(OnOneHost, BlockTransport):
    """Between GPUs of one host that can read each other's memory.

    A rank that waits for another longer than the timeout of the group ends with an error of CUDA. It keeps the bytes of
    the largest call that it has served, and what CUDA graphs use.
    """

    name = "peer_kernel"

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        super().__init__(group, device)
        self._addresses: Peers | None = None
        self._raise: list[FlagWrites] = []  # by block: it is computed
        self._begun: tuple[Tensor, Sequence[int], Room] | None = None  # what `begin` was given
        self._call: _Call | None = None  # made of that with the first block that is summed beside compute
        self._prepared: dict[_Kind, _Prepared] = {}
        if self._reason is None:
            seconds = timeout_of(group._get_backend(device)).total_seconds()
            self._patience = round(min(seconds, LONGEST_PATIENCE) * 1e9)
            limits = module.device_limits(device.index)
            mine = all_reduce_config("float32", self._size, limits).bulk_copies, limits.num_sms
            answers = gather(mine, group)
            self._bulk_copies = all(
                bulk for bulk, _ in answers
            )  # CTAs of one number have the same packets on all ranks
            self.rooms = BULK_ROOMS if self._bulk_copies else ROOMS
            self._reason = self._why_too_small(min(num_sms for _, num_sms in answers))

    def _why_too_small(self, num_sms: int) -> str | None:
        """Its CTAs wait for compute, which must not wait for their multiprocessors."""
        held = max(room.ctas for room in self.rooms)
        return f"it would hold {held} of a GPU's {num_sms} multiprocessors" if num_sms < 2 * held else None

    def begin(self, out: Tensor, rows: Sequence[int], room: int = 0) -> Tensor:
        """Rows that peers can read."""
        partials = super().begin(out, rows, room)
        if self._call is not None:
            self.give_up(self._call)
        self._begun = out, rows, self.rooms[room]
        return partials

    def all_reduce(self, partial: Tensor, out: Tensor) -> Pending:
        """By the kernel, which is launched with the last block."""
        call = self._call or self._first_block()
        group = call.one_more()
        if group is not None:
            self._raise[group].enqueue(module.current_stream(self._device.index))
        if call.is_complete:
            self._launch(call.out, _Kind(call.ends, call.out.dtype, call.ctas), self._stream.cuda_stream)
            call.end = self._stream.record_event()
            self._call = None
        return _Sum(self, call)

    def _first_block(self) -> _Call:
        """The call that has begun, from whose first block on the kernel waits for the others."""
        assert self._begun is not None
        (out, rows, room), self._begun = self._begun, None
        self._call = _Call(out, rows, room.ctas)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return self._call

    def give_up(self, call: _Call) -> None:
        """Lowers the flags of a call that has failed before its kernel was launched."""
        if self._call is call:
            assert self._peers is not None
            flags = [self._peers.flag(self._rank, Flags.READY + block) for block in range(len(call.ends))]
            FlagWrites(flags, 0).enqueue(module.current_stream(self._device.index))
            self._call = None

    def all_reduce_now(self, partial: Tensor, out: Tensor) -> None:
        """On the current stream, by more CTAs."""
        self._begun = None
        self._launch(out, _Kind((out.numel(),), out.dtype, None), module.current_stream(self._device.index))

    def release(self) -> None:
        """Gives back what peers read, and knows its addresses no more."""
        super().release()
        self._addresses = None
        self._prepared.clear()
        self._raise.clear()

    def _take(self, nbytes: int) -> PeerMemory:
        memory = PeerMemory(nbytes, Flags.COUNT, self._device, self._group_name)
        flags = tuple(memory.flag(rank, 0) for rank in range(self._size))
        self._prepared.clear()
        self._addresses = Peers(self._rank, tuple(memory.addresses), flags)
        self._raise = [FlagWrites([memory.flag(self._rank, Flags.READY + block)], 1) for block in range(MOST_BLOCKS)]
        return memory

    def _launch(self, out: Tensor, kind: _Kind, stream: int) -> None:
        if self._is_captured:
            self._keep_for_graphs(self._peers)
        enqueue, params = self._prepared.get(kind) or self._prepare(kind, out.nbytes)
        params.out = out.data_ptr()
        enqueue(stream)

    def _prepare(self, kind: _Kind, nbytes: int) -> _Prepared:
        """What is launched for calls of a kind, and kept: to make it takes longer than the launch."""
        assert self._addresses is not None
        ctas, alone = kind.ctas, kind.ctas is None
        if ctas is None:
            ctas = BULK_CTAS_ALONE if self._bulk_copies else CTAS_ALONE
        whole = alone and nbytes <= WHOLE_BYTES
        ctas = ctas_for(nbytes, self._size, ctas, whole)
        params = all_reduce_params(
            self._addresses, 0, kind.ends, ctas, self._patience, awaits_blocks=not alone, whole=whole
        )
        if len(self._prepared) >= MOST_PREPARED:
            self._prepared.clear()
        step = all_reduce_launch(kind.dtype, self._size, ctas, self._bulk_copies)
        made = self._prepared[kind] = _Prepared(all_reduce.launcher(step, params, self._device.index), params)
        return made


class _Kind(NamedTuple):
    """All that a launch depends on but the result."""

    ends: tuple[int, ...]
    dtype: torch.dtype
    ctas: int | None  # None: with all blocks computed, and the GPU to itself


class _Prepared(NamedTuple):
    """A launch but for the result, whose address is written to `params`."""

    enqueue: Callable[[int], None]  # on a stream
    params: AllReduceParams


class _Call:
    """What has begun. Of more than MOST_BLOCKS blocks, some are summed together."""

    def __init__(self, out: Tensor, rows: Sequence[int], ctas: int) -> None:
        self.out, self.ctas = out, ctas
        self._lasts, self.ends = _summed_together(tuple(rows), out.shape[1])
        self._enqueued = 0
        self.end: torch.cuda.Event | None = None
        self.is_awaited = False  # all its blocks have one end

    def one_more(self) -> int | None:
        """Another block is enqueued. Which of `ends` are complete now, if any."""
        block = self._enqueued
        self._enqueued += 1
        return self._lasts.index(block) if block in self._lasts else None

    @property
    def is_complete(self) -> bool:
        """All blocks are enqueued."""
        return self._enqueued > self._lasts[-1]


@functools.lru_cache(maxsize=256)
def _summed_together(rows: tuple[int, ...], columns: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of each group of blocks that are summed together: the last one, and where that ends, in numbers."""
    together = -(-len(rows) // MOST_BLOCKS)
    ends = [count * columns for count in accumulate(rows)]
    lasts = (*range(together - 1, len(rows) - 1, together), len(rows) - 1)
    return lasts, tuple(ends[last] for last in lasts)


class _Sum(Pending):
    def __init__(self, transport: PeerKernel, call: _Call) -> None:
        self._transport, self._call = transport, call

    def wait(self) -> None:
        if self._call.end is None:  # a block after this one has failed
            self._transport.give_up(self._call)
        elif not self._call.is_awaited:
            torch.cuda.current_stream(self._call.out.device).wait_event(self._call.end)
            self._call.is_awaited = True
