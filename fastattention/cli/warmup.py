"""`fastattention warmup`: compiles the kernels of a GPU before the first call needs them."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import NamedTuple

import torch
from rich.markup import escape

from fastattention import environment
from fastattention.backends.cuda.attention.variants import DTYPES, training_variants_of, variants_of
from fastattention.cli.compile import check_headdims
from fastattention.cli.console import OUTPUT, progress_bar
from fastattention.errors import ArgumentError, UnsupportedError
from fastattention.gpu_runtime import cache, module
from fastattention.gpu_runtime.cache import Origin
from fastattention.gpu_runtime.chips import ARCHS, Limits
from fastattention.gpu_runtime.variant import Variant


class Warmed(NamedTuple):
    """How a kernel was obtained, and how long that took."""

    kernel: Variant
    origin: Origin
    seconds: float


def warmup(device: str, headdims: list[int], dtypes: list[str], training: bool) -> None:
    """Compile and load what calls with these head dimensions and dtypes need; print where each kernel came from.

    device: as torch names it; training: gradients and dropout too. Raises UnsupportedError without such a GPU,
    CompileError where a kernel cannot be had.
    """
    for headdim in headdims:
        check_headdims(headdim=headdim)
    index = _device_index(device)
    limits = module.device_limits(index)
    if limits.target < ARCHS[-1]:
        raise UnsupportedError(
            f"{device} has compute capability {limits.target / 10:.1f}; Pascal (6.0) is the oldest that is served"
        )
    chosen = [getattr(torch, dtype) for dtype in dtypes]
    kernels = [*variants_of(limits, headdims, chosen, environment.cuda_arch()), *all_reduces_of(limits, chosen)]
    if training:
        kernels += training_variants_of(limits, headdims, chosen, environment.cuda_arch())
    with progress_bar() as bar:
        obtained = _obtain_all(kernels, limits.target)
        warmed = list(bar.track(obtained, total=len(kernels), description="compiling"))
        for kernel in bar.track(kernels, description="loading"):
            module.load_kernel(kernel, index)
    _show(device, warmed)


def all_reduces_of(limits: Limits, dtypes: Sequence[torch.dtype] = DTYPES) -> list[Variant]:
    """The kernels that sum over GPUs, for tensor parallelism. None where torch is built without torch.distributed."""
    if not torch.distributed.is_available():
        return []
    from fastattention.distributed.transports.all_reduce import usual_configs

    return list(usual_configs(limits, dtypes))


def _device_index(device: str) -> int:
    """The index of a GPU by its name in torch; the current one for "cuda". Needs a GPU to be there."""
    try:
        parsed = torch.device(device)
    except (RuntimeError, ValueError) as error:
        raise ArgumentError(f"device={device!r} is no device of torch; use cuda or cuda:0") from error
    if parsed.type != "cuda":
        raise ArgumentError(f"device={device!r} needs no kernels; use cuda or cuda:0")
    if not torch.cuda.is_available():
        raise UnsupportedError(
            "there is no GPU to warm up: torch sees no CUDA device. `fastattention compile` needs none"
        )
    index = torch.cuda.current_device() if parsed.index is None else parsed.index
    count = torch.cuda.device_count()
    if index >= count:
        raise ArgumentError(f"device={device!r} does not exist; torch sees cuda:0 to cuda:{count - 1}")
    return index


def _obtain_all(kernels: list[Variant], target: int) -> Iterator[Warmed]:
    """Yields kernels as they are ready. The compiler releases Python's lock, so kernels are compiled on all cores."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        futures: list[Future[Warmed]] = []
        try:
            for kernel in kernels:
                futures.append(pool.submit(_obtain, kernel, target))
        except RuntimeError:  # no further thread can be started: this one compiles the rest
            yield from (_obtain(kernel, target) for kernel in kernels[len(futures) :])
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _obtain(kernel: Variant, target: int) -> Warmed:
    start = time.perf_counter()
    origin = cache.obtain(kernel, target).origin
    return Warmed(kernel, origin, time.perf_counter() - start)


def _show(device: str, warmed: list[Warmed]) -> None:
    OUTPUT.print(f"kernels of {escape(device)}", style="italic")
    for kernel, origin, seconds in sorted(warmed, key=lambda one: one.kernel.name):
        OUTPUT.print(f"{seconds:7.2f} s  {origin.value:8}  {kernel.name}", soft_wrap=True)
    counts = Counter(one.origin for one in warmed)
    sources = ", ".join(f"{counts[origin]} from the {origin.value}" for origin in Origin)
    OUTPUT.print(
        f"{len(warmed)} kernels: {sources}. The cache is {escape(str(environment.kernel_cache()))}", soft_wrap=True
    )
