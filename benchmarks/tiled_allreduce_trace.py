"""One call of tiled_allreduce.py in a trace: hidden communication, and slowdown of compute."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from overlap import Activity, Overlap, overlap
from torch.profiler import ProfilerActivity, profile

MARK = "spin_kernel"  # the kernel of torch.cuda._sleep
WARM_UP = 2


def trace(work: Callable[[], object]) -> Overlap:
    """The activities of this rank's GPU in one call, which all ranks begin together."""
    for _ in range(WARM_UP):
        work()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        dist.barrier()  # ranks take different times to start a trace
        torch.cuda.synchronize()
        torch.cuda._sleep(1)  # type: ignore[no-untyped-call]
        work()
        torch.cuda.synchronize()
    return overlap(after_mark(activities(profiler)))


def activities(profiler: profile) -> list[Activity]:
    """All activities of the device, by their start; times count from the first one."""
    recorded = profiler.profiler
    assert recorded is not None
    assert recorded.kineto_results is not None
    events = [event for event in recorded.kineto_results.events() if "CUDA" in str(event.device_type())]
    begin = min(event.start_ns() for event in events)
    found = []
    for event in events:
        start = event.start_ns() - begin  # in integers: nanoseconds since 1970 do not fit a float
        found.append(Activity(event.name(), start / 1e9, (start + event.duration_ns()) / 1e9))
    return sorted(found, key=lambda activity: activity.start)


def after_mark(found: list[Activity]) -> list[Activity]:
    """The activities that began after the mark, which the trace must have."""
    [mark] = [each for each in found if MARK in each.name]
    return [each for each in found if each.start >= mark.end]
