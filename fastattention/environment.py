"""The environment variables of the package: what each means, and how it is read."""

from __future__ import annotations

import os
from pathlib import Path

from fastattention.errors import ArgumentError


def cpu_isa() -> str | None:
    """FASTATTENTION_CPU_ISA: the instruction set of the cpu backend; `fastattention info` lists those of this machine.

    Unset or empty: the best one the processor has.
    """
    return os.environ.get("FASTATTENTION_CPU_ISA") or None


def cpu_library() -> str | None:
    """FASTATTENTION_CPU_LIBRARY: path of the native library to load instead of the installed one (sanitizer builds)."""
    return os.environ.get("FASTATTENTION_CPU_LIBRARY") or None


def cuda_arch() -> int | None:
    """FASTATTENTION_CUDA_ARCH: the code path of the cuda backend, 60, 70, 75 or 80, for a GPU that is as new or newer.

    Unset or empty: the newest that the GPU can run.
    """
    chosen = os.environ.get("FASTATTENTION_CUDA_ARCH")
    if not chosen:
        return None
    try:
        return int(chosen)
    except ValueError as error:
        raise ArgumentError(f"FASTATTENTION_CUDA_ARCH={chosen!r} must be one of 60, 70, 75 and 80") from error


def ascend_kernels() -> tuple[str, ...]:
    """FASTATTENTION_ASCEND: what computes on Ascend NPUs, vendor (operators of torch_npu) or triton (our kernels).

    Unset or empty: an operator of torch_npu where one serves the call exactly, our kernels otherwise.
    """
    chosen = os.environ.get("FASTATTENTION_ASCEND")
    if not chosen:
        return ("vendor", "triton")
    if chosen not in ("vendor", "triton"):
        raise ArgumentError(f"FASTATTENTION_ASCEND={chosen!r} must be vendor or triton")
    return (chosen,)


def check_float16_range() -> bool:
    """FASTATTENTION_CHECK_RANGE: 1 refuses bfloat16 values beyond float16, where the GPU computes in float16.

    Every call then waits for the GPU. Unset or empty: such values become infinite.
    """
    return _switch("FASTATTENTION_CHECK_RANGE", os.environ.get("FASTATTENTION_CHECK_RANGE"))


def check_numbers() -> bool:
    """FASTATTENTION_CHECK_NUMBERS: 1 checks lengths, offsets and page indices of calls on any device.

    Every call then waits for its device, and none can be captured in a graph. Unset or empty: they are checked on the
    CPU only, and on a GPU a sequence whose cache has no room for an append gives NaN instead.
    """
    return _switch("FASTATTENTION_CHECK_NUMBERS", os.environ.get("FASTATTENTION_CHECK_NUMBERS"))


def _switch(name: str, chosen: str | None) -> bool:
    if chosen not in (None, "", "0", "1"):
        raise ArgumentError(f"{name}={chosen!r} must be 1 (on) or 0 (off)")
    return chosen == "1"


def kernel_cache() -> Path:
    """FASTATTENTION_CACHE: folder for GPU kernels compiled on this machine.

    Unset or empty: fastattention in XDG_CACHE_HOME, or in ~/.cache. A user without a home has to set it.
    """
    chosen = os.environ.get("FASTATTENTION_CACHE")
    if chosen:
        return Path(chosen)
    caches = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(caches or Path.home() / ".cache") / "fastattention"
    except RuntimeError as error:  # Path.home() raises it when neither HOME nor the user's entry names a folder
        raise ArgumentError(
            "FASTATTENTION_CACHE is not set, and this user has no home folder for what is compiled; "
            "set it to a folder that can be read and written"
        ) from error


def api_key() -> str | None:
    """FASTATTENTION_API_KEY: the key of `fastattention serve`, which other users of the machine cannot read here.

    Unset or empty: everyone is served, unless --api-key is given.
    """
    return os.environ.get("FASTATTENTION_API_KEY") or None


def peer_to_peer_disabled() -> bool:
    """NCCL_P2P_DISABLE: 1 keeps GPUs from reading each other's memory directly, here as in NCCL."""
    return os.environ.get("NCCL_P2P_DISABLE") == "1"


def collective_settings() -> dict[str, str]:
    """Every NCCL_... and HCCL_... variable: they change how fast devices exchange data."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(("NCCL_", "HCCL_"))}
