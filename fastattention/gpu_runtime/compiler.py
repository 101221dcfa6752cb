"""Compiles kernel sources to cubins with NVRTC. Needs no GPU and no driver."""

from __future__ import annotations

import functools
import re
from typing import Any, NamedTuple

from fastattention.errors import CompileError
from fastattention.gpu_runtime.variant import Variant


class Resources(NamedTuple):
    """Resources of a thread that a function takes, as ptxas reports them."""

    registers: int
    spill_bytes: int  # stored and loaded again because registers ran out
    stack_bytes: int


class Cubin(NamedTuple):
    """Machine code of one variant."""

    code: bytes
    log: str

    @property
    def resources(self) -> dict[str, Resources]:
        """Resources of each entry, by its name, read from the assembler's log."""
        _, *parts = re.split(r"Compiling entry function '(\w+)'", self.log)
        return {name: _resources(text) for name, text in zip(parts[::2], parts[1::2], strict=True)}


def _resources(log: str) -> Resources:
    def number(pattern: str) -> int:
        return sum(int(found) for found in re.findall(pattern, log))

    return Resources(
        number(r"Used (\d+) registers"),
        number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
        number(r"(\d+) bytes stack frame"),
    )


@functools.cache
def _nvrtc() -> Any:
    """cuda.bindings.nvrtc. Raises CompileError when it, or the compiler that it drives, is not installed.

    cuda.bindings finds the compiler: one that the process has loaded, else a wheel's in site-packages (torch's CUDA
    builds bring one), then conda's, the system's, CUDA_PATH's. Bindings 12.9 and 13 both drive NVRTC 12.1 to 13. Where
    12 and 13 are installed side by side both use 13, which supports neither Pascal nor Volta.
    """
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise CompileError(
            f"kernels that were not built ahead need NVRTC, which cannot be loaded ({reason}); "
            "install it with pip install '.[cuda12]' in the source tree, or '.[cuda13]' beside a torch of CUDA 13"
        ) from error
    return nvrtc


def why_unavailable() -> str | None:
    """Why nothing can be compiled here, or None."""
    try:
        _nvrtc()
    except CompileError as error:
        return str(error)
    return None


def _checked(result: tuple[Any, ...]) -> Any:
    """The values of an NVRTC call, whose first is a status."""
    status, *values = result
    if int(status) != 0:
        raise CompileError(f"NVRTC answers {status}")
    return values[0] if len(values) == 1 else values


def version() -> tuple[int, int]:
    """(major, minor) of the compiler."""
    major, minor = _checked(_nvrtc().nvrtcVersion())
    return int(major), int(minor)


def supported_targets() -> tuple[int, ...]:
    """Compute capabilities that the compiler can build for, as 10 * major + minor."""
    return tuple(int(target) for target in _checked(_nvrtc().nvrtcGetSupportedArchs()))


def why_not_target(target: int) -> str | None:
    """Why the installed compiler cannot build for a compute capability, or None."""
    targets = supported_targets()
    if target in targets:
        return None
    numbers = ".".join(map(str, version()))
    advice = "a newer NVRTC may"
    if target < targets[0]:
        advice = (
            "CUDA 12 is the last that builds for Pascal and Volta: put those of CUDA 12 in the place of torch and of "
            "nvidia-cuda-nvrtc, with pip install '.[cuda12]' in the source tree"
        )
    known = ", ".join(map(str, targets))
    return f"NVRTC {numbers} builds for compute capabilities {known}, not {target}; {advice}"


def options(target: int) -> list[str]:
    """Everything the compiler is told besides the source: part of the cache's key."""
    # Standard C++ has no place for __device__ in lambdas, hence the last option.
    return [f"-arch=sm_{target}", "-std=c++17", "--ftz=true", "--device-as-default-execution-space"]


def source(config: Variant) -> str:
    """The source that is compiled: the compile-time parameters and one header."""
    return f'{config.declaration}#include "{config.source}"\n'


def compile_kernel(config: Variant, target: int) -> Cubin:
    """Compiles one variant for one compute capability. Raises CompileError with the compiler's log."""
    nvrtc = _nvrtc()
    if (reason := why_not_target(target)) is not None:
        raise CompileError(reason)
    program = _checked(nvrtc.nvrtcCreateProgram(source(config).encode(), b"kernel.cu", 0, [], []))
    try:
        folders = [f"-I{folder}" for folder in config.include_folders]
        arguments = [option.encode() for option in (*options(target), *folders, "--ptxas-options=-v")]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(arguments), arguments)
        log = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
        if int(status) != 0:
            raise CompileError(f"{config.name} does not compile for sm_{target}:\n{log}")
        return Cubin(_bytes(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program), log)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _bytes(size: Any, get: Any, program: Any) -> bytes:
    buffer: bytes = b"\0" * _checked(size(program))
    _checked(get(program, buffer))
    return buffer


def _text(size: Any, get: Any, program: Any) -> str:
    return _bytes(size, get, program).rstrip(b"\0").decode(errors="replace")
