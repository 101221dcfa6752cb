"""The device of a call: whether kernels run on it, and how they are enqueued there."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from fastattention import environment
from fastattention.gpu_runtime import module
from fastattention.gpu_runtime.chips import ARCHS
from fastattention.gpu_runtime.module import KernelLaunch


def why_unavailable() -> str | None:
    """Why no kernel can run on this machine, or None."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    return module.why_unavailable()


def index_of(device: torch.device) -> int:
    """The index of a device; "cuda" alone is the current one."""
    index: int | None = device.index
    return torch.cuda.current_device() if index is None else index


def why_not(device: torch.device) -> str | None:
    """Why no kernel runs on tensors of a device, or None. FASTATTENTION_CUDA_ARCH must be a code path of it."""
    if device.type != "cuda":
        return f"tensors are on {device}; the cuda backend takes tensors on cuda"
    target = module.device_limits(index_of(device)).target
    if target < ARCHS[-1]:
        return f"{device} has compute capability {target / 10:.1f}; Pascal (6.0) is the oldest that is served"
    forced = environment.cuda_arch()
    if forced is not None and not (forced in ARCHS and forced <= target):
        allowed = ", ".join(str(arch) for arch in ARCHS if arch <= target)
        return f"FASTATTENTION_CUDA_ARCH={forced} is no code path of {device}; choose one of {allowed}"
    return None


def launcher(launch: KernelLaunch, device: torch.device) -> Callable[[ctypes.Structure], None]:
    """A function that enqueues a kernel with given parameters on the current stream of a device."""
    index, num_ctas = index_of(device), launch.num_ctas
    enqueue_on = launch.function(index).launch
    current_device, current_stream = module.current_device, module.current_stream

    def enqueue(params: ctypes.Structure) -> None:
        if index == current_device():
            enqueue_on(params, num_ctas, current_stream(index))
        else:
            with torch.cuda.device(index):
                enqueue_on(params, num_ctas, current_stream(index))

    return enqueue
