"""Loads cubins on a device and launches their kernels, through the CUDA driver."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from fastattention.errors import CompileError
from fastattention.gpu_runtime import cache, compiler
from fastattention.gpu_runtime.chips import Limits
from fastattention.gpu_runtime.variant import Entry, Variant

_FIRST_OVERLAPPING = 90  # the compute capability from which kernels may overlap
_MAX_LAUNCH_CONFIGS = 1024


def _without_cuda(device_index: int = 0) -> Any:
    raise CompileError("this torch is built without CUDA")


# Every call uses these internal functions of torch: their wrappers in torch.cuda would cost as much as a launch. The
# index of the current device, once there is a tensor on one; torch.cuda checks that first.
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", _without_cuda)
# The handle of the current stream of a device.
current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _without_cuda)
# Whether a graph of the current stream is being captured.
is_capturing: Callable[[], bool] = getattr(torch._C, "_cuda_isCurrentStreamCapturing", _without_cuda)


@functools.cache
def driver_bindings() -> Any:
    """cuda.bindings.driver. Raises CompileError when it is not installed."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise CompileError(
            f"kernels are launched through cuda-bindings, which cannot be loaded ({error}); "
            "install it with pip install '.[cuda12]' in the source tree, or '.[cuda13]' beside a torch of CUDA 13"
        ) from error
    return driver


def why_unavailable() -> str | None:
    """Why kernels cannot be launched here, or None. Needs no GPU to answer."""
    try:
        driver_bindings()
    except CompileError as error:
        return str(error)
    return None if cache.BUILT_AHEAD.is_dir() else compiler.why_unavailable()


def checked(result: tuple[Any, ...], doing: str) -> Any:
    """The value of a driver call, whose first is a status."""
    status, *values = result
    if int(status) != 0:
        raise CompileError(f"{doing}: the CUDA driver answers {status.name}")
    return values[0] if values else None


@functools.cache
def device_limits(device_index: int) -> Limits:
    """The limits of a device, asked from the driver."""
    driver = driver_bindings()
    checked(driver.cuInit(0), "starting CUDA")
    device = checked(driver.cuDeviceGet(device_index), f"opening cuda:{device_index}")
    names = driver.CUdevice_attribute

    def attribute(name: str) -> int:
        value = getattr(names, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(checked(driver.cuDeviceGetAttribute(value, device), f"asking cuda:{device_index}"))

    return Limits(
        target=10 * attribute("COMPUTE_CAPABILITY_MAJOR") + attribute("COMPUTE_CAPABILITY_MINOR"),
        shared_per_cta=attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        shared_per_sm=attribute("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR"),
        num_sms=attribute("MULTIPROCESSOR_COUNT"),
        l2_bytes=attribute("L2_CACHE_SIZE"),
        registers_per_sm=attribute("MAX_REGISTERS_PER_MULTIPROCESSOR"),
    )


def bind_context() -> None:
    """Makes the context of torch's current device that of this thread, where torch has had no reason to yet.

    Autograd's threads, and those of users, begin without one: memory from torch's cache needs none.
    """
    driver = driver_bindings()
    if int(checked(driver.cuCtxGetCurrent(), "asking for a context")) == 0:
        device = checked(driver.cuDeviceGet(current_device()), "opening the current device")
        # Torch has retained it already, and keeps it.
        context = checked(driver.cuDevicePrimaryCtxRetain(device), "asking for torch's context")
        checked(driver.cuCtxSetCurrent(context), "making torch's context current")


class Function:
    """One entry of a variant, loaded on a device."""

    def __init__(self, entry: Entry, handle: Any) -> None:
        self._launch = driver_bindings().cuLaunchKernel
        self._handle, self._num_threads, self._shared_bytes = handle, 32 * entry.num_warps, entry.shared_bytes

    def launch(self, params: ctypes.Structure, num_ctas: int, stream: int) -> None:
        """Enqueues it on a stream of the current device; `params` is copied before this returns."""
        arguments = ctypes.c_void_p(ctypes.addressof(params))  # an array of one pointer
        address = ctypes.addressof(arguments)
        call = self._handle, num_ctas, 1, 1, self._num_threads, 1, 1, self._shared_bytes, stream, address, 0
        (status,) = self._launch(*call)
        if status:
            _launch_in_context(status, self._launch, *call)


class OverlappingFunction(Function):
    """A function that starts while the kernel before it ends ("programmatic dependent launch", from Hopper on)."""

    def __init__(self, entry: Entry, handle: Any) -> None:
        super().__init__(entry, handle)
        self._launch = driver_bindings().cuLaunchKernelEx
        self._configs: dict[tuple[int, int], Any] = {}  # by number of CTAs and stream: making one takes microseconds

    def launch(self, params: ctypes.Structure, num_ctas: int, stream: int) -> None:
        """Enqueues it on a stream of the current device; `params` is copied before this returns."""
        config = self._configs.get((num_ctas, stream)) or self._config(num_ctas, stream)
        arguments = ctypes.c_void_p(ctypes.addressof(params))
        call = config, self._handle, ctypes.addressof(arguments), 0
        (status,) = self._launch(*call)
        if status:
            _launch_in_context(status, self._launch, *call)

    def _config(self, num_ctas: int, stream: int) -> Any:
        driver = driver_bindings()
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = num_ctas, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = self._num_threads, 1, 1
        config.sharedMemBytes, config.hStream = self._shared_bytes, stream
        config.attrs, config.numAttrs = [attribute], 1
        if len(self._configs) >= _MAX_LAUNCH_CONFIGS:
            self._configs.clear()
        self._configs[num_ctas, stream] = config
        return config


def _launch_in_context(status: Any, launch: Callable[..., Any], *call: Any) -> None:
    """Launches again if the thread had no context. Raises CompileError for any other status."""
    if status == driver_bindings().CUresult.CUDA_ERROR_INVALID_CONTEXT:
        bind_context()
        (status,) = launch(*call)
    if status:
        raise CompileError(f"launching a kernel: the CUDA driver answers {status.name}")


class Kernel:
    """One variant, loaded on the device that is current when it is made."""

    functions: tuple[Function, ...]  # one for each entry of the variant

    def __init__(self, config: Variant, target: int) -> None:
        driver = driver_bindings()
        self._module = checked(driver.cuModuleLoadData(cache.cubin(config, target)), f"loading {config.name}")
        limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        functions = []
        for entry in config.entries:
            handle = checked(driver.cuModuleGetFunction(self._module, entry.name.encode()), config.name)
            checked(driver.cuFuncSetAttribute(handle, limit, entry.shared_bytes), config.name)
            overlaps = entry.overlaps and target >= _FIRST_OVERLAPPING
            functions.append(OverlappingFunction(entry, handle) if overlaps else Function(entry, handle))
        self.functions = tuple(functions)


@functools.cache
def load_kernel(config: Variant, device_index: int) -> Kernel:
    """The kernel on a device, loaded once; compiled first when it was not built ahead and is not cached."""
    with torch.cuda.device(device_index):
        bind_context()
        return Kernel(config, device_limits(device_index).target)


@dataclass
class KernelLaunch:
    """One kernel launch."""

    variant: Variant
    entry: int  # index of the entry in the variant
    num_ctas: int
    loaded: dict[int, Function] = field(default_factory=dict)  # by device

    def function(self, device_index: int) -> Function:
        """The function on a device, loaded when first asked for."""
        function = self.loaded.get(device_index)
        if function is None:
            function = self.loaded[device_index] = load_kernel(self.variant, device_index).functions[self.entry]
        return function
