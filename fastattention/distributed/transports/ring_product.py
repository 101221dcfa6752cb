"""ring_product: running sums go round the ranks by copy engines, and the product of each rank adds to them.

Other all-reduces need multiprocessors to add partial sums, or time between two products. A GEMM can accumulate into the
incoming partial sum (beta = 1) at no extra cost. So each rank owns a share of every block of rows, and the sum of a
share goes from rank to rank:

    the rank after its owner computes it            step 0                            the stream of the compute
    the next rank fetches it                        flag "passed on"                  copy engine, a stream of its own
    and adds its own, as it computes it             step 1, ..., up to the owner's    the stream of the compute
    all other ranks fetch it from the owner         flag "complete"                   copy engine, another stream

While a sum is on its way, shares of the blocks before and after are computed: in turn t, step s of block t - s. Each
rank computes every element once and fetches it as often as in any ring. Only the sums of the last block are not hidden.
Ranks synchronize by flags in memory, which streams wait for without a kernel. Operations are enqueued in such an order
that none waits for a later one, on any rank. So streams may share a hardware queue.

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
    """A transport between GPUs of one host that can read each other's memory.

    The process of a rank that waits for another longer than the timeout of the group ends (gpu_runtime/watchdog.py),
    unless a graph waits. It keeps the bytes of the largest call that it has served, and what CUDA graphs use.
    """

    name = "ring_product"
    recipes = RING

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        super().__init__(group, device)
        self._steps: RingSteps | None = None  # exists as long as the memory that peers read
        if self._reason is None:
            self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
            self._gathering = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
            # Events are reused, because making them takes longer than recording: where one stream follows another, and
            # in turns for the arrival of the sum of a step.
            self._following = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._here = [[torch.cuda.Event() for _ in range(self._size)] for _ in range(2)]  # type: ignore[no-untyped-call]
            self._watchdog = Watchdog(self.name, device, timeout_of(group._get_backend(device)).total_seconds())

    def attention_rows(self, rows: tuple[int, ...]) -> tuple[int, ...]:
        """The rows of each block: ranks ask for its shares in different orders, and the first computes attention."""
        return joined(rows)

    def run(self, compute: Compute, out: Tensor, rows: tuple[int, ...]) -> None:
        """Runs the ring. A single block goes round too, with nothing to compute meanwhile."""
        self._begin(out.nbytes)
        assert self._steps is not None
        is_inference = torch.is_inference_mode_enabled()
        kind = Kind(rows, out.shape, out.dtype, is_inference, module.current_stream(self._device.index))
        stream, steps = self._steps.of(kind, out)
        self._follow(stream, self._stream, self._gathering)  # a captured graph must contain all three
        try:
            for (start, stop), partial, before, then in steps:
                if before is not None:
                    before.wait(stream)
                # Even without rows, so that an error occurs in the same step on all ranks.
                compute(start, stop, partial, adds=before is not None)
                if isinstance(then, PassOn):
                    self._pass_on(then)
                else:
                    self._gather(then, stream, out.data_ptr())
        except BaseException:
            with contextlib.suppress(Exception):  # the first error is raised
                self._give_up(stream)
                self._end(stream)
            raise
        self._end(stream)

    def _pass_on(self, then: PassOn) -> None:
        """Tells the next rank that a sum is ready, and fetches the sum of the previous rank for the next step."""
        enqueue_all(then.operations)
        then.here.record(self._stream)

    def _gather(self, then: Gather, stream: torch.cuda.Stream, target: int) -> None:
        """Tells all ranks that this rank's share is complete, and fetches all shares to the result at `target`."""
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
        """After an error, in one step on all ranks: all reset their flags, once no rank raises one of this call."""
        assert self._steps is not None
        self._follow(stream, self._gathering)
        self._follow(self._stream, self._gathering)
        flags = self._steps.flags
        for each in (flags.failed, *flags.lower):
            each.enqueue(self._gathering.cuda_stream)

    def _end(self, stream: torch.cuda.Stream) -> None:
        """Lets the compute stream go on when everything has arrived and no rank still reads this call's rows."""
        assert self._steps is not None
        self._steps.flags.read.enqueue(self._gathering.cuda_stream)
        if not self._is_captured:
            self._watchdog.finish(self._gathering.cuda_stream)
        self._follow(self._gathering, stream)

    def _follow(self, first: torch.cuda.Stream, *others: torch.cuda.Stream) -> None:
        """Makes the other streams wait for all work that the first stream has now."""
        self._following.record(first)
        for other in others:
            self._following.wait(other)

    def _take(self, nbytes: int) -> PeerMemory:
        memory = PeerMemory(nbytes, RingFlags.needed(self._size), self._device, self._group_name)
        self._steps = RingSteps(memory, self._rank, self._size, self._here, self._stream, self._gathering)
        return memory

    def release(self) -> None:
        """Frees the memory that peers read, and forgets its flags."""
        super().release()
        self._steps = None
