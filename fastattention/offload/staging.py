"""Uploads ahead of their use: chunks of the layers in CPU memory, each in one of a few buffers on the device.

Old keys and values do not depend on the queries to come. So while the device computes one layer, those of the next
layers in CPU memory are uploaded already, in the order of use, as far as there are buffers. The first layer of the next
step follows the last one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fastattention.errors import CacheFullError
from fastattention.offload.device import Copy, Device, Event, Upload
from fastattention.offload.memory import ceil_div
from fastattention.offload.pages import PagePool, Pages, PageShape, allocate_pages, runs


class HostTokens(Protocol):
    """The tokens of one layer that are in CPU memory."""

    @property
    def host_tokens(self) -> int:
        """Tokens of every sequence, whole pages."""

    @property
    def host_pages(self) -> Sequence[Sequence[int]]:
        """Pages of every sequence, in order."""

    @property
    def downloaded(self) -> Event:
        """The event after which all of them have arrived; None when nothing was sent."""


@dataclass(eq=False)
class StagingBuffer:
    """Memory on the device for a chunk, and the event after which it may be written."""

    pages: Pages
    block_table: Tensor  # int32 (batch_size, pages a sequence)
    free: Event


class StagedChunk(NamedTuple):
    """Tokens begin ... end - 1 of every sequence of a layer, in a buffer from `arrived` on."""

    buffer: StagingBuffer
    begin: int
    end: int
    arrived: Event


@dataclass(eq=False)
class Visit:
    """One use of a layer: its first `end` tokens are uploaded; uploads of those before `issued` are enqueued."""

    layer: HostTokens
    end: int
    issued: int = 0
    chunks: deque[StagedChunk] = field(default_factory=deque)
    uploads: list[Upload] = field(default_factory=list)
    begun: bool = False


class Staging:
    """The buffers, and the order in which they are filled.

    tokens: tokens of a sequence that a buffer has room for, whole pages; count: number of buffers, at least 1
    host: the pages in CPU memory
    layers: all layers, in the order in which every step uses them
    remedy: what to change when the buffers are too small, for errors

    share: the share of a layer that is uploaded, 0 to 1; the caller may change it
    """

    def __init__(
        self,
        device: Device,
        host: PagePool,
        layers: Sequence[HostTokens],
        *,
        batch_size: int,
        tokens: int,
        count: int,
        remedy: str,
    ) -> None:
        self._device, self._host, self._page_size = device, host, host.shape.page_size
        self.share = 0.0
        self._layers, self._remedy = layers, remedy
        self._pages = batch_size * ceil_div(tokens, host.shape.page_size)  # pages of a buffer
        self._buffers = [_buffer(device, host.shape, self._pages) for _ in range(count)]
        self.divide(batch_size)
        self._free = deque(self._buffers)
        self._visits: deque[Visit] = deque()
        self._whole = False  # whether the last use was of all tokens; the next is then expected to be so too

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(tensor.nbytes for buffer in self._buffers for tensor in buffer.pages.tensors())

    @property
    def tokens(self) -> int:
        """Tokens of a sequence that a buffer has room for: whole pages."""
        return self._buffers[0].block_table.shape[1] * self._page_size

    def divide(self, batch_size: int) -> None:
        """Divides the memory for another number of sequences. Nothing must be prefetched. Raises CacheFullError."""
        if batch_size > self._pages:
            raise CacheFullError(
                f"buffers on the device hold {self._pages} pages, too few for {batch_size} sequences; {self._remedy}"
            )
        each = self._pages // batch_size
        table = torch.arange(batch_size * each, dtype=torch.int32, device=self._device.torch_device)
        for buffer in self._buffers:
            buffer.block_table = table.view(batch_size, each)

    def begin(self, layer: HostTokens, whole: bool) -> Visit:
        """Begins the use of a layer. whole: all its tokens, not just the share that is uploaded."""
        self._whole = whole
        if not self._visits or self._visits[0].layer is not layer or self._visits[0].begun:
            self.flush()  # the order is not as expected, or a use never finished
            self._visits.append(self._visit(layer))
        visit = self._visits[0]
        visit.begun = True
        if whole and visit.end < layer.host_tokens:
            self._drop_all_after(visit)  # prefetched chunks would hold the buffers that this layer needs first
            visit.end = layer.host_tokens
        return visit

    def chunks(self, visit: Visit) -> Iterator[StagedChunk]:
        """The chunks of a visit in order; the computation may read each chunk until the next one is asked for."""
        assert visit is self._visits[0]
        self._fill()
        while visit.chunks:
            chunk = visit.chunks[0]
            self._device.wait(chunk.arrived)
            yield chunk
            free = self._device.mark()  # may fail, so nothing has changed yet
            visit.chunks.popleft()
            self._give_back(chunk.buffer, free)
            self._fill()
        assert visit.issued == visit.end

    def finish(self, visit: Visit) -> None:
        """Ends a visit, once its layer has its new length, and uploads for the next."""
        assert visit is self._visits[0]
        assert not visit.chunks
        self._visits.popleft()
        if not self._visits:
            self._visits.append(self._visit(self._following(visit.layer)))
        self._fill()

    def flush(self) -> list[Event]:
        """Drops prefetched chunks, because lengths or pages change. Returns the events at which their uploads end."""
        arrivals = [chunk.arrived for visit in self._visits for chunk in visit.chunks]
        for visit in self._visits:
            self._drop(visit)
        self._visits.clear()
        return arrivals

    def _visit(self, layer: HostTokens) -> Visit:
        tokens = layer.host_tokens
        share = 1.0 if self._whole else self.share
        return Visit(layer, min(tokens, round(share * tokens / self._page_size) * self._page_size))

    def _following(self, layer: HostTokens) -> HostTokens:
        """The next layer with tokens in CPU memory; the first layer follows the last."""
        position = next(index for index, other in enumerate(self._layers) if other is layer)
        later = [*self._layers[position + 1 :], *self._layers[: position + 1]]
        return next(other for other in later if other.host_tokens)

    def _fill(self) -> None:
        """Uploads as much as there are free buffers for."""
        while self._free and self._visits:
            visit = self._visits[-1]
            if visit.issued == visit.end:
                following = self._following(visit.layer)
                # Tokens that a layer gains in this step are uploaded only after it.
                if any(other.layer is following for other in self._visits):
                    return
                self._visits.append(self._visit(following))
            else:
                self._upload(visit, self._free[0])  # may fail, so the buffer stays free until then
                self._free.popleft()

    def _upload(self, visit: Visit, buffer: StagingBuffer) -> None:
        begin, end = visit.issued, min(visit.issued + self.tokens, visit.end)
        first, last = begin // self._page_size, end // self._page_size
        copies = []
        for sequence, pages in enumerate(visit.layer.host_pages):
            row = sequence * buffer.block_table.shape[1]
            for position, page, count in runs(pages[first:last], self._host.slab_pages):
                for target, source in zip(buffer.pages.tensors(), self._host.pages.tensors(), strict=True):
                    to = row + position
                    copies.append(Copy(target[to : to + count], source[page : page + count]))
        after = [buffer.free] if visit.layer.downloaded is None else [buffer.free, visit.layer.downloaded]
        upload = self._device.upload(copies, after)
        visit.uploads.append(upload)
        visit.chunks.append(StagedChunk(buffer, begin, end, upload.end))
        visit.issued = end

    def _drop_all_after(self, visit: Visit) -> None:
        while self._visits[-1] is not visit:
            self._drop(self._visits.pop())

    def _drop(self, visit: Visit) -> None:
        while visit.chunks:
            chunk = visit.chunks.popleft()
            self._give_back(chunk.buffer, chunk.arrived)

    def _give_back(self, buffer: StagingBuffer, free: Event) -> None:
        buffer.free = free
        self._free.append(buffer)


def _buffer(device: Device, shape: PageShape, pages: int) -> StagingBuffer:
    def allocate(size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device.torch_device)

    # Earlier users of this memory may still be running. The table depends on the number of sequences.
    return StagingBuffer(
        allocate_pages(shape, pages, allocate), torch.empty(0, dtype=torch.int32, device="cpu"), device.mark()
    )
