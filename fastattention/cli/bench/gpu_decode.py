"""The question "gpu_decode": the speed of one query per sequence against its cache on a GPU.

float16, heads of 128. Compared are torch's kernels for the same call, pages of several sizes in random order, quantized
caches, and the code paths of older GPUs. Calls are captured in graphs and replayed, so that host time does not count.
Caches take turns where one would stay in the L2 cache. Rates are those of the bytes of keys and values that are read.
Medians of interleaved rounds, timed by the GPU.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch import Tensor
from torch.nn.attention import SDPBackend

from fastattention import fast_attn_with_kvcache
from fastattention.attention.validation import KvCacheArguments, Options, prepare_kvcache
from fastattention.backends.cuda.attention.backend import CudaBackend
from fastattention.cli.bench.gpu import TimedCall, check_gpu, newest_path, processor_microseconds, sdpa, show_reasons
from fastattention.cli.bench.record import write_record
from fastattention.cli.bench.timing import interleaved_on_device, time_on_device
from fastattention.cli.console import OUTPUT, first_line, progress_bar
from fastattention.cli.machine import describe_machine
from fastattention.gpu_runtime.chips import ARCHS
from fastattention.quantized import quantize

HEADDIM = 128
PEERS = {"SDPA flash": SDPBackend.FLASH_ATTENTION, "SDPA cudnn": SDPBackend.CUDNN_ATTENTION}
STORED = {"int8": torch.int8, "float8": torch.float8_e4m3fn}
PAGES = (1, 16, 64, 256)
MOST_BYTES = 40_000_000_000  # largest cache
CACHE_TURN_BYTES = 400_000_000  # size of all caches that take turns: several times the L2 cache


class DecodeShape(NamedTuple):
    """Sequences of one length."""

    batch_size: int
    nheads: int
    nheads_k: int
    seqlen: int

    @property
    def cache_bytes(self) -> int:
        """Keys and values in float16."""
        return 4 * self.batch_size * self.nheads_k * self.seqlen * HEADDIM


HEADS = ((32, 32), (32, 8), (64, 8))
FULL_LENGTHS = ((1, 1024), (1, 4096), (1, 8192), (1, 65536), (1, 131072), (8, 4096), (8, 32768), (16, 8192), (64, 4096),
                (64, 16384))  # fmt: skip
QUICK_LENGTHS = ((1, 8192), (8, 32768))
# Shapes for which other layouts and older paths are measured too.
VARIED = (DecodeShape(1, 32, 8, 65536), DecodeShape(8, 32, 8, 32768), DecodeShape(1, 32, 32, 8192))


def answer(seqlens: Sequence[int], rounds: int, output: Path) -> None:
    """Measure the current GPU, print a table, write gpu_decode.json into `output`. Raises ArgumentError without one.

    seqlens: as for the question "gpu"; few of them mean few shapes here.
    """
    check_gpu("gpu_decode")
    lengths = FULL_LENGTHS if len(seqlens) > 2 else QUICK_LENGTHS
    shapes = [DecodeShape(batch, *heads, seqlen) for heads in HEADS for batch, seqlen in lengths]
    report = {
        "machine": describe_machine(),
        "copy_gbps": copy_bandwidth(rounds),
        "call_us": call_microseconds(),
        "measurements": measure([shape for shape in shapes if shape.cache_bytes <= MOST_BYTES], rounds),
    }
    show(report)
    write_record(output / "gpu_decode.json", report)


def measure(shapes: Sequence[DecodeShape], rounds: int) -> list[dict[str, Any]]:
    """A record for every shape."""
    records = []
    with progress_bar() as bar:
        for shape in bar.track(shapes, description="decode"):
            ways: dict[str, Way] = {
                "fastattention": ours,
                **{name: partial(by_torch, peer) for name, peer in PEERS.items()},
            }
            if shape in VARIED:
                ways |= variations()
            records.append(record(shape, ways, rounds))
            torch.cuda.empty_cache()
    return records


Way = Callable[[DecodeShape, Tensor, Tensor], TimedCall]


def variations() -> dict[str, Way]:
    """Pages, quantized caches, and the code paths of older GPUs."""
    ways: dict[str, Way] = {f"pages of {size}": partial(in_pages, size) for size in PAGES}
    ways |= {f"{name} cache": partial(in_bytes, stored) for name, stored in STORED.items()}
    return ways | {f"sm{arch} path": partial(ours, arch=arch) for arch in ARCHS if arch < newest_path()}


def record(shape: DecodeShape, ways: Mapping[str, Way], rounds: int) -> dict[str, Any]:
    """Times every way of computing a shape in turns; one that does not serve it is left out, with its reason."""
    caches = [
        tuple(
            torch.randn(shape.batch_size, shape.seqlen, shape.nheads_k, HEADDIM, device="cuda", dtype=torch.float16)
            for _ in range(2)
        )
        for _ in range(max(1, min(48, -(-CACHE_TURN_BYTES // shape.cache_bytes))))
    ]
    graphs: dict[str, CapturedCalls] = {}
    reasons: dict[str, str] = {}
    for name, way in ways.items():
        try:
            graphs[name] = CapturedCalls([way(shape, k, v) for k, v in caches])
        except Exception as error:  # a peer may raise anything for calls that it does not serve
            reasons[name] = first_line(error) or type(error).__name__
    microseconds = graph_microseconds(graphs, rounds)
    gbps = {name: shape.cache_bytes / taken / 1e3 for name, taken in microseconds.items()}
    return {**shape._asdict(), "microseconds": microseconds, "gbps": gbps, "reasons": reasons}


class CapturedCalls:
    """Calls that are captured once and replayed. Keeps alive the tensors that they read."""

    def __init__(self, calls: list[TimedCall]) -> None:
        self.calls = calls
        for call in calls:
            call()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for call in calls:
                call()

    def replay(self) -> None:
        """Runs all calls."""
        self._graph.replay()


def graph_microseconds(graphs: Mapping[str, CapturedCalls], rounds: int) -> dict[str, float]:
    """Median microseconds of a call, the graphs taking turns."""
    seconds = interleaved_on_device({name: graph.replay for name, graph in graphs.items()}, rounds, calls_per_turn=1)
    return {name: 1e6 * seconds[name] / len(graph.calls) for name, graph in graphs.items()}


def copy_bandwidth(rounds: int) -> float:
    """GB/s of a copy of 2 GiB within the GPU, reading and writing."""
    source = torch.randint(0, 255, (2 << 30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    seconds = statistics.median(time_on_device(lambda: target.copy_(source)) for _ in range(rounds))
    return 2 * len(source) / seconds / 1e9


def queries(shape: DecodeShape) -> Tensor:
    """Queries (batch_size, 1, nheads, headdim)."""
    return torch.randn(shape.batch_size, 1, shape.nheads, HEADDIM, device="cuda", dtype=torch.float16)


def ours(shape: DecodeShape, k: Tensor, v: Tensor, arch: int | None = None, **more: Tensor) -> TimedCall:
    """Our backend on a cache as it lies, by the code path `arch`."""
    backend = CudaBackend(arch)
    seqlens = torch.full((shape.batch_size,), shape.seqlen, dtype=torch.int32, device="cuda")
    arguments = KvCacheArguments(queries(shape), k, v, cache_seqlens=seqlens, **more)
    return partial(backend.forward, *prepare_kvcache(arguments, Options()))


def in_pages(size: int, shape: DecodeShape, k: Tensor, v: Tensor) -> TimedCall:
    """Our backend on the same memory as pages in random order."""
    num_blocks = shape.batch_size * shape.seqlen // size
    table = torch.randperm(num_blocks, device="cuda").int().reshape(shape.batch_size, -1)
    k, v = (cache.view(num_blocks, size, shape.nheads_k, HEADDIM) for cache in (k, v))
    return ours(shape, k, v, block_table=table)


def in_bytes(stored: torch.dtype, shape: DecodeShape, k: Tensor, v: Tensor) -> TimedCall:
    """Our backend on a quantized cache."""
    (k_stored, k_scale), (v_stored, v_scale) = quantize(k, stored), quantize(v, stored)
    return ours(shape, k_stored, v_stored, k_scale=k_scale, v_scale=v_scale)


def by_torch(peer: SDPBackend, shape: DecodeShape, k: Tensor, v: Tensor) -> TimedCall:
    """Torch's attention by one of its kernels."""
    q, k, v = (tensor.transpose(1, 2) for tensor in (queries(shape), k, v))
    return partial(sdpa, peer, q, k, v, causal=False)


def call_microseconds() -> dict[str, float]:
    """Host time of a call on a short cache, without and with an append."""
    q, k, v = (torch.randn(1, 1, 8, HEADDIM, dtype=torch.float16, device="cuda") for _ in range(3))
    k_cache, v_cache = (torch.zeros(1, 64, 8, HEADDIM, device="cuda", dtype=torch.float16) for _ in range(2))
    seqlens = torch.ones(1, dtype=torch.int32, device="cuda")
    return {
        "fast_attn_with_kvcache": processor_microseconds(
            lambda: fast_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=seqlens), 1000
        ),
        "with an append": processor_microseconds(
            lambda: fast_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=seqlens), 1000
        ),
    }


def show(report: dict[str, Any]) -> None:
    """Print the tables: every shape compared with torch, then the variations."""
    machine = report["machine"]
    title = f"GB/s of keys and values, {machine['gpus'][0]}, torch {machine['versions']['torch']}"
    table = Table("batch", "heads", "keys", "fastattention", *PEERS, "microseconds", title=title)
    for one in report["measurements"]:
        rates = (f"{one['gbps'][name]:.0f}" if name in one["gbps"] else "" for name in ("fastattention", *PEERS))
        heads = f"{one['nheads']}:{one['nheads_k']}"
        taken = f"{one['microseconds']['fastattention']:.1f}"
        table.add_row(str(one["batch_size"]), heads, str(one["seqlen"]), *rates, taken)
    OUTPUT.print(table)
    OUTPUT.print(f"a copy within the GPU: {report['copy_gbps']:.0f} GB/s, reading and writing")
    for one in report["measurements"]:
        others = {name: taken for name, taken in one["microseconds"].items() if name not in ("fastattention", *PEERS)}
        for name, taken in others.items():
            speed = one["microseconds"]["fastattention"] / taken
            what = f"{one['batch_size']} x {one['seqlen']} keys, {one['nheads']}:{one['nheads_k']} heads, {name}"
            OUTPUT.print(f"{what}: {taken:.1f} us, {speed:.2f} times as fast as float16 in rows")
    show_reasons(report)
    calls = ", ".join(f"{name} {value:.1f} us" for name, value in report["call_us"].items())
    OUTPUT.print(f"processor time of a call: {calls}")
