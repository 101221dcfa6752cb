"""Watchdog: ends processes whose GPU waits for flags that no other rank will set."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref

import torch

from fastattention.gpu_runtime.streams import U32_MODULUS, stream_write_value32

_LOOKS = 20  # checks within a timeout
_LONGEST_REST = 1.0  # seconds between checks

_log = logging.getLogger(__name__)


class Watchdog:
    """Ends the process when its GPU finishes no call within a timeout, as the watchdog of torch's NCCL does.

    The GPU writes the number of every finished call to host memory, which a thread reads now and then. The thread does
    not call CUDA, which blocks while another thread waits for the GPU in it. Replays of CUDA graphs have no number and
    are not watched; nor does NCCL watch them.
    """

    def __init__(self, name: str, device: torch.device, seconds: float) -> None:
        self._name, self._device, self._seconds = name, device, seconds
        self._finished = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")
        self._address = self._finished.data_ptr()
        self._enqueued = 0
        self._thread: threading.Thread | None = None

    def finish(self, stream: int) -> None:
        """Marks a call as finished at the current point of a stream of the current device."""
        if self._thread is None:
            rest = min(self._seconds / _LOOKS, _LONGEST_REST)
            self._thread = threading.Thread(target=_watch, args=(weakref.ref(self), rest), daemon=True)
            self._thread.start()
        number = (self._enqueued + 1) % U32_MODULUS
        stream_write_value32(self._address, number, stream)
        self._enqueued = number

    @property
    def finished(self) -> int:
        """The number of the newest call that the GPU has finished."""
        return int(self._finished.item()) % U32_MODULUS

    @property
    def is_idle(self) -> bool:
        """Whether all calls are finished. A `finish` that was interrupted before it had counted may add one."""
        return (self.finished - self._enqueued) % U32_MODULUS < U32_MODULUS // 2

    def check(self, since: float) -> None:
        """Ends the process if nothing has been finished since that time (of time.monotonic) for too long."""
        if time.monotonic() - since > self._seconds:
            _log.critical(
                "%s: a sum over the ranks is not done within the %g seconds of its group's timeout: a rank has died, "
                "failed or made another call. %s waits for it, and this process ends",
                self._name,
                self._seconds,
                self._device,
            )
            os.abort()


def _watch(reference: weakref.ref[Watchdog], rest: float) -> None:
    """Checks until the watchdog is garbage-collected."""
    seen, since = 0, time.monotonic()
    while (watchdog := reference()) is not None:
        if watchdog.is_idle or watchdog.finished != seen:
            seen, since = watchdog.finished, time.monotonic()
        else:
            watchdog.check(since)
        del watchdog
        time.sleep(rest)
