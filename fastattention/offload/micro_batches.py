"""Runs parts of a batch concurrently, each with a thread and a CUDA stream of its own.

While the CPU attends for one part, the device computes layers of another. The weights are read once for every part;
prediction.py predicts when that pays.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from fastattention.engine.eager import autocast_dtype
from fastattention.offload.device import Device, Event

T = TypeVar("T")


def run_together(device: Device, works: Sequence[Callable[[], T]]) -> list[T]:
    """Runs all of `works` concurrently, and gives their results in order.

    On the device each begins after the work that the calling thread has enqueued so far, in branch 0, 1, ..., and the
    calling thread goes on after all of them. Gradients, inference mode, autocast, the default device and context
    variables are as in the calling thread; other modes of torch that belong to a thread are not.

    Works may free memory of the caller that they use: the caller allocates nothing meanwhile, and goes on after their
    end. Tensors that they return, alone or in tuples, lists and mappings, are safe to use in the caller.

    The first exception, in order of works, is raised once all have ended. An interruption of the caller is also raised
    only then.
    """
    if not works:
        return []
    modes, begun, ends = _Modes.current(device), device.mark(), list[Event]()

    def run(work: Callable[[], T], branch: contextlib.AbstractContextManager[object]) -> T:
        with modes.entered(), branch:
            device.wait(begun)
            try:
                return work()
            finally:
                ends.append(device.mark())

    running: list[futures.Future[T]] = []
    try:
        with futures.ThreadPoolExecutor(len(works)) as threads:
            try:
                for number, work in enumerate(works):
                    running.append(threads.submit(contextvars.copy_context().run, run, work, device.branch(number)))
            finally:
                _wait_for(running)
    finally:
        for end in ends:
            device.wait(end)
    results = [each.result() for each in running]
    for tensor in _tensors(results):
        device.adopt(tensor)
    return results


@dataclass(frozen=True)
class _Modes:
    """The modes of torch that belong to a thread, and that a forward pass may depend on."""

    inference: bool
    gradients: bool
    autocast: dict[str, torch.dtype]  # by type of device, where it is on
    default_device: torch.device

    @classmethod
    def current(cls, device: Device) -> _Modes:
        """The modes of the calling thread."""
        kinds = {"cpu", device.torch_device.type}
        return cls(
            torch.is_inference_mode_enabled(),
            torch.is_grad_enabled(),
            {kind: dtype for kind in kinds if (dtype := autocast_dtype(kind)) is not None},
            torch.get_default_device(),
        )

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Enters these modes in another thread."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.gradients))
            for kind, dtype in self.autocast.items():
                # The cache of autocast is off, because threads share it: weights that one branch casts may not be ready
                # for another.
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=False))
            if self.default_device != torch.get_default_device():
                stack.enter_context(self.default_device)
            yield


def _wait_for(running: Sequence[futures.Future[T]]) -> None:
    """Waits until all have ended. Only then raises interruptions of this thread, which joining threads would not do."""
    interruption: KeyboardInterrupt | None = None
    while any(not each.done() for each in running):
        try:
            futures.wait(running)
        except KeyboardInterrupt as error:
            interruption = error
    if interruption is not None:
        raise interruption


def _tensors(results: object) -> Iterator[Tensor]:
    if isinstance(results, Tensor):
        yield results
    elif isinstance(results, Mapping):
        yield from _tensors(list(results.values()))
    elif isinstance(results, list | tuple):
        for each in results:
            yield from _tensors(each)
