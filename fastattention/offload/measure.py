"""Measures the Hardware of this machine, in about a second."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from fastattention.attention.validation import KvCacheArguments, Options
from fastattention.kv_store.memory import map_huge_pages
from fastattention.offload.cpu_attention import prepare_attention
from fastattention.offload.cpu_attention_queue import CpuAttentionQueue, attention_threads
from fastattention.offload.device import Copy, CpuWork, Device, cuda_device
from fastattention.offload.hardware import Hardware
from fastattention.offload.pages import Pages, PageShape, allocate_pages
from fastattention.quantized import quantize

BYTES = 1 << 30  # bytes of keys and values: beyond the caches of processors
UPLOAD_BYTES = 256 << 20
ROUNDS = 5
HANDOVERS = 16
GROUP = 4  # query heads a key head, as in most models today
# The overhead of Python and launches of a layer, beyond reading its weights. It is assumed, since it depends on the
# model.
LAYER_OVERHEAD_SECONDS = 100e-6


@functools.cache
def hardware_around(gpu: torch.device, shape: PageShape, nheads: int) -> Hardware:
    """`measure_hardware`, run once in a process. nheads: query heads, which matter for latents."""
    return measure_hardware(gpu, shape, nheads if shape.values_in_keys else GROUP * shape.nheads_k)


def measure_hardware(gpu: torch.device, shape: PageShape, nheads: int | None = None) -> Hardware:
    """The machine around `gpu` as it is now, for pages of this shape. nheads: query heads; None: GROUP a key head.

    Takes 1.3 GiB of memory on the host and 0.5 on the GPU. Raises ArgumentError unless `gpu` is one.
    """
    device = cuda_device(gpu)
    uploaded = torch.empty(UPLOAD_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
    target, other = (torch.empty_like(uploaded, device=gpu) for _ in range(2))
    cpu = _CpuAttention(shape, GROUP * shape.nheads_k if nheads is None else nheads)

    def upload() -> None:
        device.upload([Copy(target, uploaded)], []).end.synchronize()

    def copy_on_gpu() -> None:
        target.copy_(other)
        device.mark().synchronize()

    link = UPLOAD_BYTES / _seconds(upload)
    attention = cpu.nbytes / _seconds(cpu.attend)
    both = _together(device, cpu, Copy(target, uploaded))
    return Hardware(
        torch.cuda.get_device_name(gpu),
        gpu_bandwidth=2 * UPLOAD_BYTES / _seconds(copy_on_gpu),  # read and written
        link_bandwidth=link,
        cpu_bandwidth=attention,
        dram_bandwidth=max(both, link, attention),
        handover_seconds=_handover_seconds(device, cpu, shape.headdim_v),
        layer_overhead_seconds=LAYER_OVERHEAD_SECONDS,
    )


class _CpuAttention:
    """A decode over pages in host memory with random values, because equal scores take less time."""

    def __init__(self, shape: PageShape, nheads: int) -> None:
        count = max(BYTES // shape.nbytes, 1)
        self.nbytes = count * shape.nbytes
        self._num_tokens = count * shape.page_size
        self._pages = allocate_pages(shape, count, _huge)
        generator = torch.Generator("cpu").manual_seed(0)
        _fill(self._pages, generator)
        self._table = torch.arange(count, dtype=torch.int32, device="cpu").view(1, -1)
        drawn = torch.randn(1, 1, nheads, shape.headdim, generator=generator, dtype=torch.float32, device="cpu")
        self.q = drawn.to(shape.dtype)
        self._out = self.q.new_empty(1, 1, nheads, shape.headdim_v)
        self._lse = torch.empty(1, nheads, 1, dtype=torch.float32, device="cpu")

    def attend(self) -> None:
        """Attends to all pages."""
        self.prepare(self.q, self._out, self._lse, attention_threads()).run()

    def prepare(self, q: Tensor, out: Tensor, lse: Tensor, num_threads: int) -> CpuWork:
        """Prepares attention to all pages."""
        return self._prepare(q, out, lse, num_threads, self._num_tokens)

    def prepare_one_token(self, q: Tensor, out: Tensor, lse: Tensor, num_threads: int) -> CpuWork:
        """Prepares attention to one token, which takes only the time of the handover."""
        return self._prepare(q, out, lse, num_threads, 1)

    def _prepare(self, q: Tensor, out: Tensor, lse: Tensor, num_threads: int, num_tokens: int) -> CpuWork:
        k, v, k_scale, v_scale = self._pages
        arguments = KvCacheArguments(
            q, k, v, cache_seqlens=num_tokens, block_table=self._table, k_scale=k_scale, v_scale=v_scale
        )
        return prepare_attention(arguments, Options(), out, lse, num_threads)


def _huge(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory aligned as that of HostMemory, because its offset within a page of the system matters."""
    return torch.frombuffer(map_huge_pages(math.prod(shape) * dtype.itemsize), dtype=dtype).view(shape)


def _fill(pages: Pages, generator: torch.Generator) -> None:
    """Fills every page with the same standard normal values, as they are stored."""
    for stored, scale in ((pages.k, pages.k_scale), (pages.v, pages.v_scale)):
        numbers = torch.randn(stored.shape[1:], generator=generator, dtype=torch.float32, device="cpu")
        if scale is None:
            stored[0] = numbers.to(stored.dtype)
        else:
            stored[0], scale[0] = quantize(numbers, stored.dtype)
    for tensor in pages.tensors():
        for page in tensor[1:]:
            page.copy_(tensor[0])


def _together(device: Device, cpu: _CpuAttention, copy: Copy) -> float:
    """Bytes a second of uploads and attention at once."""
    rates = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        uploads = [device.upload([copy], []) for _ in range(2)]
        cpu.attend()
        spent = time.perf_counter() - start
        uploads[-1].end.synchronize()
        uploading = time.perf_counter() - start
        # Each rate uses its own time, because the end of the longer one runs alone.
        rates.append(cpu.nbytes / spent + 2 * copy.source.nbytes / uploading)
    return median(rates)


def _handover_seconds(device: Device, cpu: _CpuAttention, headdim_v: int) -> float:
    """Seconds to copy a layer's queries down and its results up, with attention to one token in between.

    As in a step, the calling thread is ahead, because a long job runs first.
    """
    queue = CpuAttentionQueue(device)
    q = cpu.q.to(device.torch_device)

    def seconds(count: int) -> float:
        def attend() -> None:
            for prepare in (cpu.prepare, *[cpu.prepare_one_token] * count):
                device.wait(queue.attend(q, headdim_v, 0, prepare).span.end)
            device.mark().synchronize()

        return _seconds(attend)

    return max(seconds(HANDOVERS) - seconds(0), 0.0) / HANDOVERS


def _seconds(work: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Median seconds of `rounds` runs, after a warm-up run."""
    work()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return median(times)
