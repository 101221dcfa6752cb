"""The cooperative store on a GPU, whose streams are made to run early and late; skipped where there is none."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest
import torch
from native.callbacks import Callback
from torch import Tensor

from fastattention import fast_attn_with_kvcache
from fastattention.attention.backend import ATTENTION_BACKENDS
from fastattention.offload.cpu_stream import CpuStream
from fastattention.offload.device import Copy, CudaDevice
from fastattention.offload.kv_store import CooperativeKVStore, MemoryCaps
from fastattention.offload.layer import AttendOptions, Padding
from fastattention.offload.pages import PageShape
from fastattention.quantized import dequantize, quantize

if ATTENTION_BACKENDS.get("cuda").why_unavailable() is not None:
    pytest.skip("needs a GPU", allow_module_level=True)

NUM_LAYERS, BATCH_SIZE, NHEADS, NHEADS_K, HEADDIM = 6, 2, 8, 4, 128
PAGE_SIZE, PROMPT, STEPS = 64, 3000, 150  # several pages fill during the steps
CYCLES = 2_000_000  # about a millisecond: longer than any copy here
PADDING = [0, 700]


class Delayed(CudaDevice):
    """Each stream stops now and then, so that the others run ahead of it as far as events allow."""

    def mark(self) -> torch.cuda.Event:
        streams = [torch.cuda.current_stream(), self._up, self._down]
        if random.random() < 0.3:
            with torch.cuda.stream(random.choice(streams)):
                torch.cuda._sleep(random.randrange(CYCLES))
        event = super().mark()
        assert isinstance(event, torch.cuda.Event)
        return event


def this_gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def make_store(share: float, dtype: torch.dtype, cache_dtype: torch.dtype | None) -> CooperativeKVStore:
    shape = PageShape(PAGE_SIZE, NHEADS_K, HEADDIM, HEADDIM, dtype, cache_dtype)
    pages = BATCH_SIZE * -(-(PROMPT + STEPS) // PAGE_SIZE)
    on_device = PageShape(PAGE_SIZE, NHEADS_K, HEADDIM, HEADDIM, dtype).nbytes
    caps = MemoryCaps(8 * pages * on_device, NUM_LAYERS * pages * shape.nbytes)
    device = Delayed(this_gpu())
    store = CooperativeKVStore(NUM_LAYERS, BATCH_SIZE, shape, device, caps, lambda layers, tokens: share)
    for tensors in (store._gpu.pages, *(buffer.pages for buffer in store._staging._buffers)):
        for tensor in tensors.tensors():
            tensor.fill_(77 if tensor.dtype is torch.int8 else torch.nan)
    return store


def random_tokens(count: int, heads: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(BATCH_SIZE, count, heads, HEADDIM, device="cuda").to(dtype)


@pytest.mark.parametrize("cache_dtype", [None, torch.int8], ids=["as q", "int8"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_steps_are_right_however_streams_run(share: float, dtype: torch.dtype, cache_dtype: torch.dtype | None) -> None:
    torch.manual_seed(0)
    random.seed(0)
    store = make_store(share, dtype, cache_dtype)
    capacity = PROMPT + STEPS
    held = [
        [torch.empty(BATCH_SIZE, capacity, NHEADS_K, HEADDIM, device="cuda") for _ in "kv"] for _ in range(NUM_LAYERS)
    ]
    leftpad = torch.tensor(PADDING, dtype=torch.int32, device="cuda")
    options = AttendOptions(padding=Padding(PADDING))
    length, worst = 0, torch.zeros((), device="cuda")
    for count in (PROMPT, *[1] * STEPS):
        for index in range(NUM_LAYERS):
            k, v = (random_tokens(count, NHEADS_K, dtype) for _ in "kv")
            for all_tokens, new in zip(held[index], (k, v), strict=True):
                all_tokens[:, length : length + count] = new.float()
            if not length:
                store.append(index, k, v)
                continue
            q = random_tokens(count, NHEADS, dtype)
            out = store.attend(index, q, k, v, options)
            keys, values = (as_stored(store, index, each, length, cache_dtype) for each in held[index])
            expected = fast_attn_with_kvcache(
                q.float(), keys, values, cache_seqlens=length + count, cache_leftpad=leftpad, causal=True
            )
            worst = torch.maximum(worst, (out.float() - expected).abs().max())
        length += count
    assert sum(store.layers_on_cpu) >= 1
    assert not all(store.layers_on_cpu)
    assert worst.item() < (2e-3 if dtype is torch.float16 else 1.5e-2)


def as_stored(
    store: CooperativeKVStore, index: int, tokens: Tensor, length: int, cache_dtype: torch.dtype | None
) -> Tensor:
    """float32 values that a layer held before this step: whole pages in CPU memory are quantized."""
    if cache_dtype is None or not store.layers_on_cpu[index]:
        return tokens
    end = length // PAGE_SIZE * PAGE_SIZE
    rounded = dequantize(*quantize(tokens[:, :end], cache_dtype))
    return torch.cat([rounded, tokens[:, end:]], dim=1)


def test_times_are_known_once_events_are_over_and_not_before() -> None:
    device = CudaDevice(this_gpu())
    copy = Copy(torch.empty(1 << 20, device="cuda"), torch.ones(1 << 20).pin_memory())
    device.upload([copy], [])
    torch.cuda._sleep(200 * CYCLES)
    upload = device.upload([copy], [device.mark()])
    assert device.seconds_between(upload.begin, upload.end) is None
    assert device.seconds_between(upload.before, upload.begin) is None
    torch.cuda.synchronize()
    taken = device.seconds_between(upload.begin, upload.end)
    waited = device.seconds_between(upload.before, upload.begin)
    back = device.seconds_between(upload.end, upload.before)
    assert taken is not None
    assert waited is not None
    assert back is not None
    assert 0.0 < taken < waited
    assert back == pytest.approx(-(taken + waited), rel=1e-3)


def test_a_share_between_0_and_1_follows_the_steps() -> None:
    torch.manual_seed(0)
    store = make_store(0.4, torch.float16, None)
    shares = []
    for tokens in (PROMPT, *[1] * 30):
        for index in range(NUM_LAYERS):
            k, v = (random_tokens(tokens, NHEADS_K, torch.float16) for _ in "kv")
            if tokens == PROMPT:
                store.append(index, k, v)
            else:
                store.attend(index, random_tokens(tokens, NHEADS, torch.float16), k, v, AttendOptions())
        torch.cuda.synchronize()
        shares.append(store._staging.share)
    assert shares[2] == 0.4
    assert len(set(shares[3:])) > 10
    assert 0.0 < min(shares) <= max(shares) < 1.0


def test_nothing_is_pinned_when_a_store_is_gone() -> None:
    store = make_store(0.5, torch.float16, None)
    for index in range(NUM_LAYERS):
        store.append(index, *(random_tokens(PROMPT, NHEADS_K, torch.float16) for _ in "kv"))
    pages = store._host.pages
    del store
    # Memory that is still registered cannot be registered again.
    runtime = torch.cuda.cudart()
    memory = next(pages.tensors())
    assert int(runtime.cudaHostRegister(memory.data_ptr(), 4096, 0)) == 0
    assert int(runtime.cudaHostUnregister(memory.data_ptr())) == 0


class Increment(Callback):
    """Work of the CPU: a little later, the second of two pinned numbers becomes the first plus one."""

    def __init__(self) -> None:
        self.numbers = torch.zeros(2, dtype=torch.int64).pin_memory()
        super().__init__(self._run)

    def _run(self, _: int | None) -> None:
        time.sleep(1e-3)
        self.numbers[1] = self.numbers[0] + 1


def test_the_cpu_works_between_what_a_stream_does() -> None:
    cpu, work = CpuStream(this_gpu()), Increment()
    value = torch.zeros(1, dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(cpu.stream):
        for _ in range(100):
            torch.cuda._sleep(CYCLES // 10)
            work.numbers[:1].copy_(value, non_blocking=True)
            cpu.enqueue(work.address, 0)
            cpu.wait()
            value.copy_(work.numbers[1:], non_blocking=True)
    torch.cuda.synchronize()
    assert value.item() == 100


def test_a_job_that_could_not_be_asked_for_leaves_the_stream_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, work = CpuStream(this_gpu()), Increment()
    push: Callable[..., None] = cpu._queue.push

    def fail(*arguments: object) -> None:
        raise MemoryError

    with torch.cuda.stream(cpu.stream):
        monkeypatch.setattr(cpu._queue, "push", fail)
        with pytest.raises(MemoryError):
            cpu.enqueue(work.address, 0)
        cpu.wait()
        torch.cuda.synchronize()
        monkeypatch.setattr(cpu._queue, "push", push)
        torch.cuda._sleep(10 * CYCLES)
        work.numbers[:1].copy_(torch.full((1,), 7, device="cuda"), non_blocking=True)
        cpu.enqueue(work.address, 0)
        cpu.wait()
    torch.cuda.synchronize()
    assert work.numbers.tolist() == [7, 8]


def test_a_stream_that_nobody_has_any_more_waits_for_no_job() -> None:
    cpu, work = CpuStream(this_gpu()), Increment()
    with torch.cuda.stream(cpu.stream):
        torch.cuda._sleep(10 * CYCLES)
        cpu.enqueue(work.address, 0)
        cpu.wait()
    del cpu
    torch.cuda.synchronize()
