"""CooperativeKVStore: the KV cache of a whole model within memory budgets on a device and on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from fastattention.attention.interface import fast_attn_with_kvcache
from fastattention.attention.merge import merge_attn_states
from fastattention.errors import ArgumentError, CacheFullError
from fastattention.offload.cpu_attention_queue import CpuAttentionQueue, CpuResults
from fastattention.offload.device import CpuWork, Device
from fastattention.offload.eviction_order import eviction_order
from fastattention.offload.host_memory import HostMemory
from fastattention.offload.layer import AttendOptions, Layer
from fastattention.offload.lengths import LengthTensors
from fastattention.offload.memory import STAGING_BUFFERS, ceil_div, least_pages, staging_pages
from fastattention.offload.pages import PagePool, PageShape
from fastattention.offload.staging import StagedChunk, Staging, Visit
from fastattention.offload.upload_controller import LayerTiming, UploadController

# More new tokens than this are a prompt: the device attends to all keys, and those in CPU memory are uploaded for it.
MOST_QUERIES_ON_CPU = 32


class MemoryCaps(NamedTuple):
    """Bytes that the store may take, and advice for errors when they do not suffice."""

    gpu: int
    cpu: int
    gpu_remedy: str = "raise gpu_memory"
    cpu_remedy: str = "raise cpu_memory"


class Usage(NamedTuple):
    """Where the cache lives."""

    num_layers_gpu: int
    num_layers_cpu: int
    gpu_bytes: int  # pages in use and buffers
    cpu_bytes: int  # pages in use


class CooperativeKVStore:
    """Keys and values of every layer of a model, for a batch of sequences of one length.

    All layers begin on the device. When its budget is used up, layers move to CPU memory, one after another and spread
    over the depth of the model, as far as that budget goes. The CPU attends to a layer's pages there, or they are
    uploaded ahead and the device attends to them, or each does a part. The parts are merged exactly.

    shape: the shape of a page; cache_dtype is that of CPU memory, the device holds `dtype`
    share: the share of the layers in CPU memory that every step uploads, 0 to 1, from their number and their tokens.
        Between 0 and 1 it is a prediction, which the store corrects by the measured times of steps
        (upload_controller.py)

    A step uses the layers in order, each once. Before its first layer there is room for all of them, or CacheFullError
    is raised and the store is as it was. A step that ended early, by any exception, is undone by the next. Tokens that
    come back from quantized pages, by that or by `truncate`, stay rounded.
    """

    def __init__(
        self,
        num_layers: int,
        batch_size: int,
        shape: PageShape,
        device: Device,
        budget: MemoryCaps,
        share: Callable[[int, int], float],
    ) -> None:
        self.shape, self._device, self._budget, self._share_of = shape, device, budget, share
        on_device = replace(shape, cache_dtype=None)
        staging_tokens = _staging_tokens(batch_size, shape, budget.gpu)
        staging_bytes = STAGING_BUFFERS * batch_size * ceil_div(staging_tokens, shape.page_size) * shape.nbytes
        num_pages = max(budget.gpu - staging_bytes, 0) // on_device.nbytes
        self._check_least(num_layers, batch_size, num_pages, on_device.nbytes)
        self._gpu = PagePool(
            on_device, num_pages, self._allocate, name="the device", remedy=budget.gpu_remedy, wait=device.wait
        )
        memory = HostMemory(shape, device)
        self._host = PagePool(
            shape, budget.cpu // shape.nbytes, memory.allocate, name="CPU memory", remedy=budget.cpu_remedy,
            wait=device.wait, use=memory.use, slab_pages=memory.slab_pages,
        )  # fmt: skip
        self._lengths = LengthTensors(device.torch_device)
        self._layers = [Layer(batch_size, device, self._gpu, self._host, self._lengths) for _ in range(num_layers)]
        self._order = eviction_order(num_layers)
        self._cpu_queue = CpuAttentionQueue(device)
        self._staging = Staging(
            device, self._host, self._layers, batch_size=batch_size, tokens=staging_tokens, count=STAGING_BUFFERS,
            remedy=budget.gpu_remedy,
        )  # fmt: skip
        self._controller = UploadController(device)
        self._length = 0
        self._settled = True  # whether all layers hold `_length` tokens, and no pages for more

    @property
    def batch_size(self) -> int:
        """Sequences."""
        return self._layers[0].batch_size

    @property
    def length(self) -> int:
        """Tokens of every sequence in every layer after the last finished step."""
        return self._length

    def length_of(self, index: int) -> int:
        """Tokens of every sequence in one layer: those of `length`, and those of a current step."""
        return self._layers[index].length

    @property
    def layers_on_cpu(self) -> list[bool]:
        """Whether each layer has left the device."""
        return [layer.on_cpu for layer in self._layers]

    @property
    def usage(self) -> Usage:
        """Where the cache lives now."""
        on_cpu = sum(self.layers_on_cpu)
        gpu_bytes = self._gpu.used * self._gpu.shape.nbytes + self._staging.nbytes
        return Usage(len(self._layers) - on_cpu, on_cpu, gpu_bytes, self._host.used * self.shape.nbytes)

    def append(self, index: int, k: Tensor, v: Tensor) -> None:
        """Appends a prompt to a layer and attends to nothing.

        k, v: (batch_size, seqlen_new, nheads_k, headdim or headdim_v), dtype of the store, on its device
        """
        self._begin(index, k.shape[1], whole_at_once=False)
        layer = self._layers[index]
        chunk = self._staging.tokens if layer.on_cpu else max(k.shape[1], 1)
        for begin in range(0, k.shape[1], chunk):
            layer.append(k[:, begin : begin + chunk], v[:, begin : begin + chunk])
        self._end(index)

    def attend(self, index: int, q: Tensor, k: Tensor, v: Tensor, options: AttendOptions) -> Tensor:
        """Appends k and v to a layer and attends to all it then holds: (batch_size, seqlen_q, nheads, headdim_v).

        q: (batch_size, seqlen_q, nheads, headdim), the newest tokens; k, v: as for `append`, as many tokens as q has
        """
        self._begin(index, k.shape[1], whole_at_once=True)
        layer = self._layers[index]
        if options.indices is not None:
            out = self._attend_to_selected(layer, q, k, v, options)
        elif layer.host_tokens:
            out = self._attend_to_parts(layer, q, k, v, options)
        else:
            out = layer.attend_on_device(q, k, v, options, return_lse=False)
            layer.finish(k.shape[1])
        self._end(index)
        return out

    def _attend_to_selected(self, layer: Layer, q: Tensor, k: Tensor, v: Tensor, options: AttendOptions) -> Tensor:
        """Attention to selected keys. Few queries gather theirs from CPU memory; for many the layer is uploaded."""
        if not layer.host_tokens:
            out: Tensor = layer.attend_to_selected(q, k, v, options)
        elif q.shape[1] <= MOST_QUERIES_ON_CPU:
            out = layer.attend_to_gathered(q, k, v, options)
        else:
            out = layer.attend_to_uploaded(q, k, v, options)
        layer.finish(k.shape[1])
        return out

    def _attend_to_parts(self, layer: Layer, q: Tensor, k: Tensor, v: Tensor, options: AttendOptions) -> Tensor:
        """Attention to the tokens on the device, to uploaded ones, and to those that the CPU attends to, merged."""
        visit = self._staging.begin(layer, whole=self._staging.share >= 1.0 or q.shape[1] > MOST_QUERIES_ON_CPU)
        on_cpu = None if visit.end == layer.host_tokens else self._attend_on_cpu(q, layer, visit.end, options)
        parts = [self._attend_to_chunk(q, chunk, options) for chunk in self._staging.chunks(visit)]
        parts.append(layer.attend_on_device(q, k, v, options, return_lse=True))
        if on_cpu is not None:
            self._device.wait(on_cpu.span.end)
            parts.append((on_cpu.out, on_cpu.lse))
        self._controller.observe(_layer_timing(visit, on_cpu))
        layer.finish(k.shape[1])
        self._staging.finish(visit)
        outs, lses = zip(*parts, strict=True)
        return merge_attn_states(outs, lses)[0]

    def truncate(self, length: int) -> None:
        """Forgets all but the first `length` tokens of every sequence. Raises ArgumentError for more than it holds."""
        if not 0 <= length <= self.length:
            raise ArgumentError(f"length={length} must be 0 to {self.length}, the tokens of every sequence")
        self._length, self._settled = length, False
        self._settle()

    def select(self, rows: Sequence[int]) -> None:
        """Sequence i becomes a copy of sequence rows[i], for beams or for another batch size.

        Raises ArgumentError for rows that do not exist, and CacheFullError.
        """
        if not rows or not all(0 <= row < self.batch_size for row in rows):
            raise ArgumentError(f"rows={list(rows)} must be some of 0 to {self.batch_size - 1}")
        self._settle()
        self._quiet()
        self._gpu.check(sum(len(rows) - layer.num_gpu_pages_owned for layer in self._layers if layer.on_cpu))
        after = self._device.mark()
        self._staging.divide(len(rows))  # the last operation that may fail, so that all layers change, or none
        for layer in self._layers:
            layer.select(rows, after)

    def _attend_to_chunk(self, q: Tensor, chunk: StagedChunk, options: AttendOptions) -> tuple[Tensor, Tensor]:
        k, v, k_scale, v_scale = chunk.buffer.pages
        out, lse = fast_attn_with_kvcache(
            q, k, v, cache_seqlens=self._lengths.of(q.shape[0], chunk.end - chunk.begin),
            cache_leftpad=options.leftpad(chunk.begin, chunk.end, q.device), block_table=chunk.buffer.block_table,
            softmax_scale=options.softmax_scale, softcap=options.softcap, k_scale=k_scale, v_scale=v_scale,
            return_lse=True,
        )  # fmt: skip
        return out, lse

    def _attend_on_cpu(self, q: Tensor, layer: Layer, begin: int, options: AttendOptions) -> CpuResults:
        def prepare(q: Tensor, out: Tensor, lse: Tensor, num_threads: int) -> CpuWork:
            return layer.prepare_on_cpu(q, begin, options, out, lse, num_threads)

        return self._cpu_queue.attend(q, self.shape.headdim_v, layer.host_bytes(begin), prepare, layer.downloaded)

    def _begin(self, index: int, tokens: int, whole_at_once: bool) -> None:
        """Prepares a layer of a step. whole_at_once: the device must hold all new tokens of a layer at once."""
        if index == 0:
            self._settle()
            self._make_room(tokens, whole_at_once)
            self._settled = False
        elif self._layers[index].length != self._layers[index - 1].length - tokens:
            raise ArgumentError(f"layer {index} must follow layer {index - 1} in every step, with as many new tokens")

    def _end(self, index: int) -> None:
        """Ends a layer of a step."""
        if index == len(self._layers) - 1:
            self._controller.end_step()
            self._length, self._settled = self._layers[index].length, True

    def _settle(self) -> None:
        """Undoes an unfinished step, or completes an interrupted `truncate`."""
        if self._settled:
            return
        self._quiet()
        for layer in self._layers:
            layer.truncate(self._length)
        self._settled = True

    def _make_room(self, tokens: int, whole_at_once: bool) -> None:
        """Moves layers to CPU memory until a step of `tokens` fits. Checks everything before changing anything."""
        moved = self._to_move(tokens, whole_at_once)
        going = [layer for layer in self._layers if layer.on_cpu or layer in moved]
        page_size = self.shape.page_size
        to_host = sum(
            self.batch_size * ((layer.length + tokens) // page_size) - len(layer.host_pages[0]) * self.batch_size
            for layer in going
        )
        self._host.check(to_host)
        for layer in moved:
            layer.demote()
        if going:
            predicted = self._share_of(len(going), going[0].length)
            num_pages = going[0].host_tokens // page_size
            self._staging.share = self._controller.begin_step(predicted, num_pages)

    def _to_move(self, tokens: int, whole_at_once: bool) -> list[Layer]:
        moved: list[Layer] = []
        candidates = [self._layers[index] for index in self._order if not self._layers[index].on_cpu]
        while True:
            needed = sum(self._growth(layer, tokens, layer.on_cpu or layer in moved) for layer in self._layers)
            if moved or any(self.layers_on_cpu):
                needed += self._passing_through(tokens, whole_at_once)
            if needed <= self._gpu.available:
                return moved
            if not candidates:
                raise CacheFullError(
                    f"the device has {self._gpu.available} free pages of {self._gpu.num_pages}, and {tokens} tokens "
                    f"for each of {self.batch_size} sequences need {needed} even with all layers in CPU memory; "
                    f"{self._budget.gpu_remedy}, or give the prompt in smaller chunks"
                )
            moved.append(candidates.pop(0))

    def _growth(self, layer: Layer, tokens: int, on_cpu: bool) -> int:
        """Pages that a layer may add on the device in a step; negative when it frees some.

        A layer in CPU memory keeps one page for every sequence on the device, even while it does not need it: after
        `truncate` it needs the room, which other layers must not take.
        """
        if on_cpu:
            return self.batch_size - layer.num_gpu_pages_owned
        return layer.gpu_pages_for(tokens) - layer.num_gpu_pages + layer.num_pages_to_copy

    def _passing_through(self, tokens: int, whole_at_once: bool) -> int:
        """Pages that a layer takes temporarily on its way to CPU memory."""
        most = tokens if whole_at_once else min(tokens, self._staging.tokens)
        return self.batch_size * (ceil_div(most, self.shape.page_size) + 1)

    def _quiet(self) -> None:
        """Drops prefetched chunks before pages change owners. Afterwards no upload or CPU reads the pages."""
        for event in self._staging.flush():
            self._device.wait(event)
        self._cpu_queue.wait()

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device.torch_device)

    def _check_least(self, num_layers: int, batch_size: int, num_pages: int, page_bytes: int) -> None:
        """Checks the least memory: every layer keeps its newest page on the device, and one layer needs two more."""
        least = (num_layers + 2) * batch_size
        if num_pages < least:
            with_buffers = least_pages(least, batch_size)
            raise CacheFullError(
                f"{self._budget.gpu} bytes on the device are too few for {num_layers} layers and batch_size="
                f"{batch_size}: at least {with_buffers * page_bytes} are needed; {self._budget.gpu_remedy}"
            )


def _layer_timing(visit: Visit, on_cpu: CpuResults | None) -> LayerTiming | None:
    """The timing of a visit whose uploads have all been issued; None without uploads or CPU work."""
    if on_cpu is None or not visit.uploads:
        return None
    return LayerTiming(visit.uploads, on_cpu.span, visit.end, visit.layer.host_tokens - visit.end)


def _staging_tokens(batch_size: int, shape: PageShape, gpu_bytes: int) -> int:
    """Tokens of a sequence in a buffer: whole pages, at least one."""
    return staging_pages(batch_size, shape.page_size, shape.nbytes, gpu_bytes) * shape.page_size
