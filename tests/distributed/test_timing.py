"""Clocks of trials, by hand."""

from __future__ import annotations

import time
from unittest import mock

import pytest
import torch

from fastattention.distributed import timing
from fastattention.distributed.timing import BUSY, busy_seconds, called_seconds


class Device:
    """A host that launches work for some time, and a device that has done it so much later."""

    def __init__(self, launching: float, behind: float) -> None:
        self.now, self._launching, self._behind, self._done = 0.0, launching, behind, 0.0

    def work(self) -> None:
        self.now += self._launching
        self._done = self.now + self._behind

    def clock(self) -> float:
        return self.now

    def synchronize(self, device: torch.device) -> None:
        self.now = max(self.now, self._done)


@pytest.mark.parametrize(
    ("launching", "behind", "busy"),
    [
        (1.0, 9.0, 10.0),  # the device has work all the time
        (1.0, 0.5, 1.5),
        (1.0, 0.1, BUSY),  # it waits for launches, which may take longer
        (2.0, 0.0, 2 * BUSY),
    ],
)
def test_launches_that_a_device_waits_for_count_for_more(launching: float, behind: float, busy: float) -> None:
    device = Device(launching, behind)
    with (
        mock.patch.object(time, "perf_counter", device.clock),
        mock.patch.object(timing, "synchronize", device.synchronize),
    ):
        assert called_seconds(device.work, torch.device("cpu")) == pytest.approx(launching + behind)
        assert busy_seconds(device.work, torch.device("cpu")) == pytest.approx(busy)
