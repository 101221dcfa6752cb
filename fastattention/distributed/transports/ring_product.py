"""ring_product: running sums go round the ranks by copy engines, and the product of each rank adds to them.

Elsewhere sums are added up by somebody, and what adds them up wants multiprocessors, or a place between two products.
A product can start from numbers that are there, and takes no longer for it. So of every block of rows each rank owns a
share, and the sum of a share goes from rank to rank:

    the rank after its owner computes it            step 0                            the stream of the compute
    the next rank fetches it                        flag "passed on"                  copy engine, a stream of its own
    and adds its own, as it computes it             step 1, ..., up to the owner's    the stream of the compute
    all other ranks fetch it from the owner         flag "complete"                   copy engine, another stream

While a sum is on its way, shares of the blocks before and after are computed: in turn t, step s of block t - s. Every
number is computed by each rank once and fetched as often as in any ring: what remains of the sums is the last block's.
Ranks tell each other by flags in memory, which streams wait for without a kernel. Operations are enqueued in such an
order that none waits for one behind it, on any rank: so streams may share a queue of the hardware.

Sums are rounded to their dtype after every rank, as in NCCL's rings. Every rank gets the same bits, the owner's.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fastattention.distributed.object_collectives import timeout_of
from fastattention.distributed.row_partitions import RING
from fastattention.distributed.transports.base import Compute
from fastattention.distributed.transports.p2p_base import PeerToPeer
from fastattention.distributed.transports.ring_order import joined
from fastattention.distributed.transports.ring_steps import Gather, Kind, PassOn, RingFlags, RingSteps, RowCopy
from fastattention.gpu_runtime import module
from fastattention.gpu_runtime.peer_memory import PeerMemory
from fastattention.gpu_runtime.streams import copy_async, enqueue_all
from fastattention.gpu_runtime.watchdog import Watchdog


class RingProduct(PeerToPeer):
    """Between GPUs of one host that can read each other's memory.

    The process of a rank that waits for another longer than the timeout of the group ends (gpu_runtime/watchdog.py),
    unless a graph waits. It keeps the bytes of the largest call that it has served, and what CUDA graphs use.
    """

    name = "ring_product"
    recipes = RING

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        super().__init__(group, device)
        self._steps: RingSteps | None = None  # as long as there is memory that peers read
        if self._reason is None:
            self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
            self._gathering = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
            # Recorded again and again, as making them takes longer: where one stream follows another, and in turns
            # where the sum of a step is here.
            self._following = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._here = [[torch.cuda.Event() for _ in range(self._size)] for _ in range(2)]  # type: ignore[no-untyped-call]
            self._watchdog = Watchdog(self.name, device, timeout_of(group._get_backend(device)).total_seconds())

    def attention_rows(self, rows: tuple[int, ...]) -> tuple[int, ...]:
        """Of each block at once: ranks ask for its shares in different orders, and attention comes with the first."""
        return joined(rows)

    def run(self, compute: Compute, out: Tensor, rows: tuple[int, ...]) -> None:
        """One block goes round as well, with nothing to be computed meanwhile."""
        self._begin(out.nbytes)
        assert self._steps is not None
        is_inference = torch.is_inference_mode_enabled()
        kind = Kind(rows, out.shape, out.dtype, is_inference, module.current_stream(self._device.index))
        stream, steps = self._steps.of(kind, out)
        self._follow(stream, self._stream, self._gathering)  # a graph that is captured has to have all three
        try:
            for (start, stop), partial, before, then in steps:
                if before is not None:
                    before.wait(stream)
                # Of no rows too, so that whatever fails does so in the same step on all ranks.
                compute(start, stop, partial, adds=before is not None)
                if isinstance(then, PassOn):
                    self._pass_on(then)
                else:
                    self._gather(then, stream, out.data_ptr())
        except BaseException:
            with contextlib.suppress(Exception):  # what failed first is what is raised
                self._give_up(stream)
                self._end(stream)
            raise
        self._end(stream)

    def _pass_on(self, then: PassOn) -> None:
        """Tells the next rank that a sum is ready, and fetches that of the rank before, for the next step."""
        enqueue_all(then.operations)
        then.here.record(self._stream)

    def _gather(self, then: Gather, stream: torch.cuda.Stream, target: int) -> None:
        """Tells all that this rank's share is complete, and fetches all shares to the result, which is at `target`."""
        enqueue_all(then.complete)
        for completed, copy in then.of_others:
            enqueue_all(completed)
            self._fetch(copy, target)
        self._follow(stream, self._gathering)
        self._fetch(then.own, target)

    def _fetch(self, copy: RowCopy, target: int) -> None:
        if copy.nbytes:
            copy_async(target + copy.begin, copy.source, copy.nbytes, self._gathering.cuda_stream)

    def _give_up(self, stream: torch.cuda.Stream) -> None:
        """After an error, in one step on all ranks: all lower their flags, once nobody raises one of this call."""
        assert self._steps is not None
        self._follow(stream, self._gathering)
        self._follow(self._stream, self._gathering)
        flags = self._steps.flags
        for each in (flags.failed, *flags.lower):
            each.enqueue(self._gathering.cuda_stream)

    def _end(self, stream: torch.cuda.Stream) -> None:
        """The stream of the compute goes on when all is here that has been begun, and nobody reads this call's rows."""
        assert self._steps is not None
        self._steps.flags.read.enqueue(self._gathering.cuda_stream)
        if not self._is_captured:
            self._watchdog.finish(self._gathering.cuda_stream)
        self._follow(self._gathering, stream)

    def _follow(self, first: torch.cuda.Stream, *others: torch.cuda.Stream) -> None:
        """What is enqueued on the others from now on begins after all that the first stream has."""
        self._following.record(first)
        for other in others:
            self._following.wait(other)

    def _take(self, nbytes: int) -> PeerMemory:
        memory = PeerMemory(nbytes, RingFlags.needed(self._size), self._device, self._group_name)
        self._steps = RingSteps(memory, self._rank, self._size, self._here, self._stream, self._gathering)
        return memory

    def release(self) -> None:
        """Gives back what peers read, and knows its flags no more."""
        super().release()
        self._steps = None
