"""Scratch memory of decodes is never shared, and all counters begin as zeros."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

from fastattention.backends.cuda.attention import scratch
from fastattention.backends.cuda.attention.scratch import DeviceScratch, Scratch

TOTAL, OF_STREAM = 1 << 20, 1 << 14  # counters
MOST_KEPT = 1 << 23  # floats


class Gpu:
    """Replaces torch.cuda: a device whose memory is the processor's."""

    def __init__(self) -> None:
        self.captures = False
        self.waits = 0

    def is_current_stream_capturing(self) -> bool:
        return self.captures

    def current_stream(self, device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(synchronize=self._synchronize)

    def _synchronize(self) -> None:
        self.waits += 1


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()
    monkeypatch.setattr(scratch, "is_capturing", gpu.is_current_stream_capturing)
    monkeypatch.setattr(scratch.torch.cuda, "current_stream", gpu.current_stream)
    return gpu


@pytest.fixture
def of_device(gpu: Gpu) -> DeviceScratch:
    return DeviceScratch(torch.device("cpu"))


def spans_of(taken: Scratch) -> list[range]:
    """Addresses of its counters, and of its floats if it has any."""
    assert taken.counters.dtype is torch.int32
    assert taken.partials.dtype is torch.float32
    assert not taken.counters.any()
    assert (taken.num_counters, taken.num_floats) == (len(taken.counters), len(taken.partials))
    assert taken.counters_at == taken.counters.data_ptr()
    assert taken.partials_at == taken.partials.data_ptr()
    sizes = {taken.counters_at: taken.counters.nbytes, taken.partials_at: taken.partials.nbytes}
    return [range(start, start + nbytes) for start, nbytes in sizes.items() if nbytes]


def apart(*taken: Scratch) -> bool:
    """Whether none overlaps another."""
    spans = sorted((span for one in taken for span in spans_of(one)), key=lambda span: span.start)
    return all(one.stop <= following.start for one, following in itertools.pairwise(spans))


def test_a_stream_keeps_its_memory(gpu: Gpu, of_device: DeviceScratch) -> None:
    first = of_device.take(10, 500, stream=1)
    assert first.num_counters >= 10
    assert first.num_floats >= 500
    assert of_device.take(OF_STREAM, 400, stream=1) is first
    assert of_device.take(0, 0, stream=1) is first
    assert gpu.waits == 1  # until the zeros are there, for any stream that asks next


def test_streams_share_nothing(gpu: Gpu, of_device: DeviceScratch) -> None:
    assert apart(*(of_device.take(100, 1000, stream) for stream in range(5)))
    assert gpu.waits == 1


def test_a_call_that_needs_more_gets_more_for_its_stream(gpu: Gpu, of_device: DeviceScratch) -> None:
    few, many = of_device.take(1, 1, stream=1), of_device.take(3 * OF_STREAM, 1, stream=1)
    assert many.num_counters == 3 * OF_STREAM
    assert apart(few, many)
    wide = of_device.take(1, 1000, stream=1)
    assert wide.num_floats == 1000
    assert wide.counters_at == many.counters_at
    assert of_device.take(3 * OF_STREAM, 1000, stream=1) is wide
    longest = of_device.take(4 * OF_STREAM, 10, stream=1)
    assert longest.num_floats == 1000  # neither shrinks when the other grows
    assert apart(wide, longest)


def test_no_stream_keeps_very_much(gpu: Gpu, of_device: DeviceScratch) -> None:
    """A call that needs more gets its own, and the next one gets the stream's memory again."""
    before = of_device.take(1, MOST_KEPT, stream=1)
    huge = of_device.take(1, MOST_KEPT + 1, stream=1)
    assert huge.num_floats == MOST_KEPT + 1
    assert huge.counters_at == before.counters_at
    assert of_device.take(1, MOST_KEPT, stream=1).partials_at == before.partials_at
    of_others = [of_device.take(1, MOST_KEPT + 1, stream=2) for _ in range(2)]
    assert of_others[0].counters_at == of_others[1].counters_at != before.counters_at


def test_every_captured_call_has_memory_of_its_own(gpu: Gpu, of_device: DeviceScratch) -> None:
    """A graph keeps it, and may be replayed concurrently with its stream and other graphs."""
    of_stream = of_device.take(100, 10, stream=1)
    gpu.captures = True
    captured = [of_device.take(100, 10, stream=1) for _ in range(4)]
    gpu.captures = False
    assert [(one.num_counters, one.num_floats) for one in captured] == [(100, 10)] * 4
    assert apart(of_stream, *captured, of_device.take(100, 10, stream=2))
    assert of_device.take(100, 10, stream=1) is of_stream


def test_a_capture_before_any_other_call_waits_for_nothing(gpu: Gpu, of_device: DeviceScratch) -> None:
    """A stream that is being captured cannot wait: the call gets zeros that its graph writes each time."""
    gpu.captures = True
    captured = of_device.take(7, 3, stream=1)
    assert captured.num_counters == 7
    assert gpu.waits == 0
    gpu.captures = False
    assert apart(captured, of_device.take(7, 3, stream=1))


def test_when_no_counters_are_left_a_call_brings_its_own(gpu: Gpu, of_device: DeviceScratch) -> None:
    taken = [of_device.take(TOTAL - 5, 0, stream=1)]
    gpu.captures = True
    taken += [of_device.take(count, 0, stream=1) for count in (5, 6, 2 * TOTAL)]
    gpu.captures = False
    taken.append(of_device.take(1, 0, stream=2))
    assert [one.num_counters for one in taken] == [TOTAL - 5, 5, 6, 2 * TOTAL, OF_STREAM]
    assert apart(*taken)


def test_a_device_has_its_memory_once() -> None:
    assert scratch.scratch_of(3) is scratch.scratch_of(3)
    assert scratch.scratch_of(3) is not scratch.scratch_of(4)
