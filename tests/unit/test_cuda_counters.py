"""Counters of kernels: nobody has another's, and all begin as zeros."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

from fastattention.backends.cuda import counters
from fastattention.backends.cuda.counters import Counters

TOTAL, OF_STREAM = 1 << 20, 1 << 14


class Gpu:
    """Stands for torch.cuda: a device whose memory is the processor's."""

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
    monkeypatch.setattr(counters.torch.cuda, "is_current_stream_capturing", gpu.is_current_stream_capturing)
    monkeypatch.setattr(counters.torch.cuda, "current_stream", gpu.current_stream)
    return gpu


def span(tensor: torch.Tensor) -> range:
    """Its addresses."""
    assert tensor.dtype is torch.int32
    assert not tensor.any()
    return range(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)


def apart(*tensors: torch.Tensor) -> bool:
    """Whether none begins inside another."""
    spans = sorted((span(tensor) for tensor in tensors), key=lambda one: one.start)
    return all(one.stop <= following.start for one, following in itertools.pairwise(spans))


def test_a_stream_keeps_its_counters(gpu: Gpu) -> None:
    of_device = Counters(torch.device("cpu"))
    first = of_device.take(10, stream=1)
    assert len(first) >= 10
    assert span(of_device.take(OF_STREAM, stream=1)) == span(first)
    assert gpu.waits == 1  # until the zeros are there, whichever stream asks next


def test_streams_share_nothing(gpu: Gpu) -> None:
    of_device = Counters(torch.device("cpu"))
    assert apart(*(of_device.take(100, stream) for stream in range(5)))
    assert gpu.waits == 1


def test_a_call_that_needs_more_gets_more_for_its_stream(gpu: Gpu) -> None:
    of_device = Counters(torch.device("cpu"))
    few, many = of_device.take(1, stream=1), of_device.take(3 * OF_STREAM, stream=1)
    assert len(many) == 3 * OF_STREAM
    assert apart(few, many)
    assert span(of_device.take(1, stream=1)) == span(many)


def test_every_captured_call_has_counters_of_its_own(gpu: Gpu) -> None:
    """A graph keeps them, and may be replayed beside its stream and other graphs."""
    of_device = Counters(torch.device("cpu"))
    of_stream = of_device.take(100, stream=1)
    gpu.captures = True
    captured = [of_device.take(100, stream=1) for _ in range(4)]
    gpu.captures = False
    assert [len(one) for one in captured] == [100] * 4
    assert apart(of_stream, *captured, of_device.take(100, stream=2))
    assert span(of_device.take(100, stream=1)) == span(of_stream)


def test_a_capture_before_any_other_call_waits_for_nothing(gpu: Gpu) -> None:
    """A stream that is being captured cannot wait: the call gets zeros that its graph writes each time."""
    of_device = Counters(torch.device("cpu"))
    gpu.captures = True
    captured = of_device.take(7, stream=1)
    assert len(captured) == 7
    assert gpu.waits == 0
    gpu.captures = False
    assert apart(captured, of_device.take(7, stream=1))


def test_when_none_are_left_a_call_brings_its_own(gpu: Gpu) -> None:
    of_device = Counters(torch.device("cpu"))
    taken = [of_device.take(TOTAL - 5, stream=1)]
    gpu.captures = True
    taken += [of_device.take(5, stream=1), of_device.take(6, stream=1), of_device.take(2 * TOTAL, stream=1)]
    gpu.captures = False
    taken.append(of_device.take(1, stream=2))
    assert [len(one) for one in taken] == [TOTAL - 5, 5, 6, 2 * TOTAL, OF_STREAM]
    assert apart(*taken)


def test_a_device_has_its_counters_once() -> None:
    assert counters.counters_of(3) is counters.counters_of(3)
    assert counters.counters_of(3) is not counters.counters_of(4)
