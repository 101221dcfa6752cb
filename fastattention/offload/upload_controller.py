"""Adjusts the share of the KV cache that a hybrid step uploads, from the measured times of earlier steps.

In a visit to a layer the device waits for two things: the last upload, and the CPU's results. The share is right when
it waits for both equally long. It is too small by as much as the CPU is late while the link is idle: uploads that are
merely ahead would gain nothing. It is too large by as much as uploads are late. docs/internals/long-contexts.md has the
formula.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fastattention.offload.device import Device, Event, Span, Upload

GAIN = 0.5  # part of the way to the share that a step would have needed
MOST_CHANGE = 0.03  # share of the caches, in one step, so that one stall of the host does not upset the share
MOST_WAITING = 4  # steps whose events may be pending; further steps are ignored


class LayerTiming(NamedTuple):
    """Events of one visit to a layer: its uploads, at least one, and the CPU's job beside them."""

    uploads: Sequence[Upload]
    on_cpu: Span
    uploaded_tokens: int  # tokens of a sequence
    cpu_tokens: int


class StepTimings(NamedTuple):
    """The visits of one step, whose events may be pending."""

    predicted: float  # predicted share
    visits: Sequence[LayerTiming]


class VisitSeconds(NamedTuple):
    """The times of a visit."""

    uploads: float
    cpu: float
    short: float  # seconds that uploads could have gone on without a wait; negative: uploads took too long


class UploadController:
    """Corrects the predicted share of the caches that is uploaded by the measured times of steps.

    The correction is a factor, which stays while the prediction follows the length: a wrong bandwidth of the link or
    the CPU makes the predicted share wrong by about the same factor at any length.

    Only shares between 0 and 1, those of a hybrid, are corrected. A step counts if it and the step before were finished
    steps of a hybrid: others meet uploads of another share, or pages that are still downloaded. Nothing here waits for
    an event.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._factor = 1.0
        self._predicted = 0.0
        self._visits: list[LayerTiming | None] = []  # visits of the current step
        self._ended = self._follows = False  # whether a hybrid's step has ended, and whether the step before it had
        self._waiting: deque[StepTimings] = deque()

    def begin_step(self, predicted: float, num_pages: int) -> float:
        """The share of a step. num_pages: pages of a sequence that a layer has in CPU memory.

        A hybrid uploads at least a page and leaves one to the CPU: without either there is nothing to compare.
        """
        self._visits, self._predicted = [], predicted
        self._follows, self._ended = self._ended, False
        if not 0.0 < predicted < 1.0 or num_pages < 2:
            return predicted
        return min(max(predicted * self._factor, 1 / num_pages), 1 - 1 / num_pages)

    def observe(self, visit: LayerTiming | None) -> None:
        """Adds a visit of this step, which has been enqueued; None for a visit without uploads or without CPU work."""
        self._visits.append(visit)

    def end_step(self) -> None:
        """Ends a step, whose visits have all been enqueued, and evaluates earlier steps that are over.

        They are evaluated now, while this thread is ahead of the device, rather than before the first layer of a step,
        for which the device waits.
        """
        while self._waiting and (best := self._best_share(self._waiting[0])) is not None:
            self._approach(best / self._waiting[0].predicted)
            self._waiting.popleft()
        visits = [visit for visit in self._visits if visit is not None]
        self._ended = 0 < len(visits) == len(self._visits)
        if self._ended and self._follows and len(self._waiting) < MOST_WAITING:
            self._waiting.append(StepTimings(self._predicted, visits))

    def _approach(self, factor: float) -> None:
        if 0.0 < self._predicted < 1.0:
            most = MOST_CHANGE / self._predicted
            self._factor += min(max(GAIN * (factor - self._factor), -most), most)

    def _best_share(self, step: StepTimings) -> float | None:
        """The share that would have balanced both, 0 to 1; None when the step is not over."""
        seconds = []
        for visit in reversed(step.visits):  # the last to end first
            if (one := self._seconds(visit)) is None:
                return None
            seconds.append(one)
        uploaded = sum(visit.uploaded_tokens for visit in step.visits)
        left = sum(visit.cpu_tokens for visit in step.visits)
        per_token = sum(one.uploads for one in seconds) / uploaded + sum(one.cpu for one in seconds) / left
        return (uploaded + sum(one.short for one in seconds) / per_token) / (uploaded + left)

    def _seconds(self, visit: LayerTiming) -> VisitSeconds | None:
        uploads, on_cpu = visit.uploads, visit.on_cpu
        late = self._device.seconds_between(uploads[-1].end, on_cpu.end)
        cpu = self._device.seconds_between(on_cpu.begin, on_cpu.end)
        uploading = self._sum((each.begin, each.end) for each in uploads)
        idle = self._sum((each.before, each.begin) for each in uploads if each.before is not None)
        if late is None or cpu is None or uploading is None or idle is None:
            return None
        # Neither side can give the other more than all of its work.
        return VisitSeconds(uploading, cpu, max(min(late, cpu, idle), -uploading))

    def _sum(self, pairs: Iterable[tuple[Event, Event]]) -> float | None:
        total = 0.0
        for begin, end in pairs:
            if (seconds := self._device.seconds_between(begin, end)) is None:
                return None
            total += seconds
        return total
