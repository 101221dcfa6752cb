"""What does a token cost when a part of the cache is in host memory, by each policy, and does the model predict it?

    python benchmarks/long_context.py

A bare decoder (bare_decoder.py) decodes with a cache of random values under an artificial budget of GPU memory, which
keeps a given number of layers in host memory. All policies use the same cache, in turns. "classical" is our own upload
of all such layers: pinned, ahead of use, double-buffered. Transformers' offloaded cache comes with Transformers' own
model of the same shape. Bandwidths are measured in the same run, before each case and for its pages, because they vary
on a shared host.
"""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import typer
from bare_decoder import BareDecoder
from harness import RESULTS, publish
from pages import long_contexts
from torch import Tensor

from fastattention.backends.cpu.library import load_library
from fastattention.cli.bench.record import write_record
from fastattention.cli.bench.timing import in_turns, time_call
from fastattention.cli.console import MESSAGES, OUTPUT
from fastattention.cli.machine import describe_machine
from fastattention.offload.device import CudaDevice, Device
from fastattention.offload.hardware import Hardware
from fastattention.offload.kv_store import CooperativeKVStore, MemoryCaps
from fastattention.offload.layer import AttendOptions
from fastattention.offload.measure import measure_hardware
from fastattention.offload.memory import PAGE_SIZE, STAGING_BUFFERS, STAGING_SHARE, STAGING_TOKENS, OffloadWorkload
from fastattention.offload.model_shape import PRESETS, ModelShape
from fastattention.offload.pages import PageShape
from fastattention.offload.policy import Policy
from fastattention.offload.prediction import seconds_per_token, upload_fraction

CHUNK = 16384  # tokens that fill a cache at once
POLICIES = (Policy.CLASSICAL, Policy.COOPERATIVE, Policy.HYBRID)
READ_BYTES = 4 << 30  # far more than the 300 MB of a last-level cache
SETTLING_STEPS = 8  # steps in which the share of a hybrid settles; no more than a page of tokens
PINNED_COPIES = 6  # most copies of its cache that Transformers' offloading holds in host memory at a time


@dataclass(frozen=True)
class Case:
    """One row of the results. num_layers_cpu: layers in host memory; 0 measures the resident cache."""

    model: str
    seqlen: int
    num_layers_cpu: int
    batch_size: int = 1
    quantized: bool = False


CASES = (
    *(Case("llama-3-8b", 131072, layers) for layers in (0, 2, 8, 16, 32)),
    Case("llama-3-8b", 131072, 32, quantized=True),
    *(Case("llama-3-8b", 32768, layers) for layers in (0, 8)),
    Case("llama-3-8b", 524288, 8),
    Case("llama-3-8b", 1048576, 32, quantized=True),
    *(Case("llama-2-7b", 65536, layers) for layers in (8, 32)),
    Case("llama-2-7b", 32768, 8),
)


def page_of(case: Case, shape: ModelShape, dtype: torch.dtype) -> PageShape:
    """The shape of a page of a case's cache."""
    cache_dtype = torch.int8 if case.quantized else None
    return PageShape(PAGE_SIZE, shape.nheads_k, shape.headdim, shape.headdim, dtype, cache_dtype)


class Run:
    """A decoder with a full cache."""

    def __init__(self, case: Case, shape: ModelShape, device: Device, hardware: Hardware, dtype: torch.dtype) -> None:
        self.case, self.shape, self._hardware = case, shape, hardware
        self.share, self._settled = 0.0, False
        self.page = page_of(case, shape, dtype)
        self.store = CooperativeKVStore(
            shape.num_layers, case.batch_size, self.page, device, self._caps(), lambda layers, tokens: self.share
        )
        self._fill(device.torch_device)
        self.decoder = BareDecoder(shape, case.batch_size, device.torch_device, dtype)
        self._start = self.decoder.hidden.clone()

    @property
    def _workload(self) -> OffloadWorkload:
        return OffloadWorkload(self.shape, self.case.batch_size, self.case.seqlen, self.case.quantized, PAGE_SIZE)

    @property
    def _staging_bytes(self) -> int:
        return self._workload.staging_bytes(self._caps().gpu)

    def _caps(self) -> MemoryCaps:
        """Caps with which exactly the wanted layers are on the CPU, with room for the pages that a step moves."""
        pages = -(-self.case.seqlen // PAGE_SIZE) + 1
        on_gpu = self.shape.num_layers - self.case.num_layers_cpu
        passing = -(-CHUNK // PAGE_SIZE) + 2
        plain = replace(self.page, cache_dtype=None).nbytes * self.case.batch_size
        least = (on_gpu * pages + self.case.num_layers_cpu + (passing if self.case.num_layers_cpu else 0)) * plain
        cpu = self.case.num_layers_cpu * pages * self.page.nbytes * self.case.batch_size
        full = STAGING_BUFFERS * max(STAGING_TOKENS, self.case.batch_size * PAGE_SIZE) * self.page.token_bytes
        return MemoryCaps(min(least + full, STAGING_SHARE * least), cpu + self.page.nbytes)

    def _fill(self, device: torch.device) -> None:
        for begin in range(0, self.case.seqlen, CHUNK):
            size = (self.case.batch_size, min(CHUNK, self.case.seqlen - begin), self.shape.nheads_k, self.shape.headdim)
            k, v = torch.randn(2, *size, dtype=self.page.dtype, device=device)
            for layer in range(self.shape.num_layers):
                self.store.append(layer, k, v)

    def use(self, policy: Policy) -> None:
        """Switches to a policy, with the cache as it was filled. The store corrects a hybrid's predicted share."""
        layers = self.case.num_layers_cpu
        self.share = upload_fraction(policy, self._workload, self._hardware, layers, self._staging_bytes)
        self.rewind()
        if policy is Policy.HYBRID and not self._settled:
            for _ in range(SETTLING_STEPS):
                self.step().tolist()
            self._settled = True
            self.rewind()

    def predicted(self, policy: Policy) -> float:
        """The model's prediction of the seconds of a step."""
        layers = self.case.num_layers_cpu
        return seconds_per_token(policy, self._workload, self._hardware, layers, self._staging_bytes)

    def step(self) -> Tensor:
        """Decodes one token."""
        return self.decoder.step(lambda layer, q, k, v: self.store.attend(layer, q, k, v, AttendOptions()))

    def rewind(self) -> None:
        """Restores the cache as it was filled, and the first token."""
        self.store.truncate(self.case.seqlen)
        self.decoder.hidden.copy_(self._start)

    def timed_steps(self, count: int) -> list[float]:
        """Seconds of each of `count` steps, after two that fill the pipeline."""
        # A token is chosen on the host, as in generation.
        return [time_call(lambda: self.step().tolist()) for _ in range(count + 2)][2:]


def measure(run: Run, policies: tuple[Policy, ...], rounds: int, steps: int) -> dict[str, list[float]]:
    """Seconds of steps, by policy, in turns."""

    def turn(policy: Policy) -> list[float]:
        run.use(policy)
        return run.timed_steps(steps)

    found = in_turns({policy.value: partial(turn, policy) for policy in policies}, rounds)
    return {name: list(itertools.chain.from_iterable(turns)) for name, turns in found.items()}


def errors(run: Run, policies: tuple[Policy, ...]) -> dict[str, float]:
    """Largest difference of the hidden state after one step from that of the first policy, relative to the largest."""
    found = {}
    expected: Tensor | None = None
    for policy in policies:
        run.use(policy)
        run.step()
        hidden = run.decoder.hidden.to(torch.float64)
        expected = hidden if expected is None else expected
        found[policy.value] = ((hidden - expected).abs().max() / expected.abs().max()).item()
    return found


def transformers_offloaded(
    case: Case, shape: ModelShape, device: torch.device, dtype: torch.dtype, steps: int
) -> float:
    """Median seconds of a step of Transformers' own Llama with its offloaded cache: all layers are on the host."""
    from transformers import DynamicCache

    from fastattention.cli.bench.whole_model.build import build, config_of
    from fastattention.cli.bench.whole_model.decode import stepper
    from fastattention.cli.bench.whole_model.measure import seconds_of_a_step

    model: Any = build(config_of(shape, 2 * case.seqlen), dtype, device)
    cache = DynamicCache(config=model.config, offloading=True)
    # Its tensors grow with every token, and torch rounds pinned memory up to a power of two: stay below one.
    seqlen = case.seqlen - steps - 1
    keys = torch.randn(case.batch_size, shape.nheads_k, seqlen, shape.headdim, dtype=dtype, device=device)
    for layer in range(shape.num_layers):
        cache.update(keys, keys, layer)
    step = stepper(model, torch.zeros(case.batch_size, 1, dtype=torch.int64, device=device), cache)
    with torch.inference_mode():
        step()
        return seconds_of_a_step(device, step, steps)


def read_bandwidth(threads: list[int]) -> dict[int, float]:
    """Bytes a second that the CPU reads from memory."""
    library, data = load_library(), torch.ones(READ_BYTES, dtype=torch.uint8)
    reads = {count: partial(library.read_loop, data, count) for count in threads}
    return {count: READ_BYTES / median(time_call(read) for _ in range(5)) for count, read in reads.items()}


def calibrated(hardware: Hardware, case: Case, shape: ModelShape, resident_seconds: float) -> Hardware:
    """`hardware` with the overhead of a layer from a resident step of this decoder: its time beyond reading bytes."""
    workload = OffloadWorkload(shape, case.batch_size, case.seqlen)
    bare = replace(hardware, layer_overhead_seconds=0.0)
    beyond = resident_seconds - seconds_per_token(Policy.RESIDENT, workload, bare, 0, 0)
    return replace(hardware, layer_overhead_seconds=max(beyond, 0.0) / shape.num_layers)


def answer(
    case: Case, device: Device, hardware: Hardware, dtype: torch.dtype, rounds: int, steps: int
) -> dict[str, Any]:
    """The figures of a case."""
    shape = PRESETS[case.model]
    policies = POLICIES if case.num_layers_cpu else (Policy.RESIDENT,)
    gc.collect()
    if device.torch_device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    run = Run(case, shape, device, hardware, dtype)
    found = sum(run.store.layers_on_cpu)
    assert found == case.num_layers_cpu, f"{found} layers are in host memory"
    differences = errors(run, policies)
    times = measure(run, policies, rounds, steps)
    usage = run.store.usage
    return {
        **asdict(case),
        "seconds": {name: median(each) for name, each in times.items()},
        "spread": {name: [min(each), max(each)] for name, each in times.items()},
        "predicted": {policy.value: run.predicted(policy) for policy in policies},
        "difference": differences,
        "kv_gpu_bytes": usage.gpu_bytes,
        "kv_cpu_bytes": usage.cpu_bytes,
        "budget_bytes": run._caps().gpu,
        "weight_bytes": shape.weight_bytes,
        "gpu_peak_bytes": torch.cuda.max_memory_allocated() if device.torch_device.type == "cuda" else None,
    }


def run_cases(
    cases: tuple[Case, ...],
    device: Device,
    hardware_for: Callable[[PageShape], Hardware],
    dtype: torch.dtype,
    rounds: int,
    steps: int,
) -> list[dict[str, Any]]:
    """Runs every case. The resident case of the same length, else the first, gives the overhead of a layer."""
    rows = []
    overheads: dict[int, float] = {}  # by length, because long steps hide launches that short steps wait for
    for case in cases:
        hardware = hardware_for(page_of(case, PRESETS[case.model], dtype))
        if overheads:
            overhead = overheads.get(case.seqlen, next(iter(overheads.values())))
            hardware = replace(hardware, layer_overhead_seconds=overhead)
        row = answer(case, device, hardware, dtype, rounds, steps)
        MESSAGES.print(case, {name: f"{1e3 * seconds:.1f} ms" for name, seconds in row["seconds"].items()})
        rows.append(row)
        if not case.num_layers_cpu:
            hardware = calibrated(hardware, case, PRESETS[case.model], row["seconds"]["resident"])
            row["layer_overhead_seconds"] = overheads[case.seqlen] = hardware.layer_overhead_seconds
        row["hardware"] = asdict(hardware)
    return rows


def offloaded_by_transformers(rows: list[dict[str, Any]], measure_one: Callable[[Case], float]) -> None:
    """Adds Transformers' own time to the first row of each model and length whose cache leaves it room to copy."""
    host_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    done = set()
    for row in rows:
        case, shape = Case(row["model"], row["seqlen"], 0), PRESETS[row["model"]]
        cache_bytes = shape.num_layers * shape.kv_bytes_per_token() * case.seqlen
        if case in done or PINNED_COPIES * cache_bytes > host_bytes:
            continue
        done.add(case)
        gc.collect()
        torch.cuda.empty_cache()
        row["transformers_seconds"] = measure_one(case)


def main(rounds: int = 5, steps: int = 8, output: Path = RESULTS) -> None:
    """Measure the current GPU and its host; write long_context.json into `output`."""
    dtype, device = torch.bfloat16, CudaDevice(torch.device("cuda", torch.cuda.current_device()))
    cores = torch.get_num_threads()
    reading = read_bandwidth([count for count in (1, 2, 4, 8, 12, cores - 1, cores) if count <= cores])
    OUTPUT.print("CPU reads, GB/s by threads:", {count: round(rate / 1e9, 1) for count, rate in reading.items()})
    rows = run_cases(CASES, device, partial(measure_hardware, device.torch_device), dtype, rounds, steps)
    record = {"machine": describe_machine(), "cpu_read_bytes_per_s": reading, "rows": rows}
    path = output / "long_context.json"
    write_record(path, record)  # the next measurement may run out of host memory
    offloaded_by_transformers(
        rows, lambda case: transformers_offloaded(case, PRESETS[case.model], device.torch_device, dtype, steps)
    )
    publish(path, record, *long_contexts.sections("this host", record))


if __name__ == "__main__":
    typer.run(main)
