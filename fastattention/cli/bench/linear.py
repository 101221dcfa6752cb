"""The question "linear": linear attention of prompts and of single tokens, on the GPU where there is one, else the CPU.

16 heads of 128 x 128, as flash-linear-attention publishes its figures. Peers: the same in operations of torch, the
functions of Transformers' models, and flash-linear-attention where it is installed (GPU). Medians of calls in turns.
On a GPU single tokens are also timed in a CUDA graph, without host time.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor
from torch.nn.functional import logsigmoid

from fastattention import linear
from fastattention.backends.cpu.library import measure_peaks
from fastattention.cli.bench import gpu_decode, timing
from fastattention.cli.bench.gpu import TimedCall, show_reasons
from fastattention.cli.bench.record import write_record
from fastattention.cli.console import OUTPUT, first_line, progress_bar
from fastattention.cli.machine import describe_machine
from fastattention.threads import get_num_threads

OURS = "fastattention"
CPU_SECONDS = 4.0  # for each workload
SLOW_SECONDS = 0.02  # a call that takes longer on a GPU is not repeated
PROMPTS = {"cuda": ((1, 16384), (8, 2048)), "cpu": ((1, 4096),)}
STEPS = {"cuda": (1, 8, 64), "cpu": (1, 8)}
DTYPES = {"cuda": (torch.bfloat16,), "cpu": (torch.float32, torch.bfloat16)}


@dataclass(frozen=True)
class LinearWorkload:
    """One call. rule: "gated delta rule", "GLA", or "GLA, gates of heads"."""

    rule: str
    batch_size: int
    seqlen: int
    dtype: str
    nheads: int = 16
    headdim: int = 128

    @property
    def state_bytes(self) -> int:
        """Bytes of all states, counted once."""
        return 4 * self.batch_size * self.nheads * self.headdim**2

    def tensors(self, device: str) -> tuple[list[Tensor], Tensor]:
        """q, k, v, g (and beta), and the states before them."""
        generator = torch.Generator(device).manual_seed(0)
        shape = (self.batch_size, self.seqlen, self.nheads)
        dtype = getattr(torch, self.dtype)

        def normal(*more: int) -> Tensor:
            return torch.randn(*shape, *more, generator=generator, device=device, dtype=torch.float32)

        q, k, v = (normal(self.headdim).to(dtype) for _ in range(3))
        k = torch.nn.functional.normalize(k.float(), dim=-1).to(dtype)
        g = logsigmoid(normal(self.headdim)).to(dtype) if self.rule == "GLA" else logsigmoid(normal())
        state = torch.zeros(
            self.batch_size, self.nheads, self.headdim, self.headdim, device=device, dtype=torch.float32
        )
        beta = [normal().sigmoid().to(dtype)] if self.rule == "gated delta rule" else []
        return [q, k, v, g, *beta], state


def answer(rounds: int, output: Path) -> None:
    """Measure, print a table, write linear_gpu.json or linear_cpu.json into `output`. rounds: rounds on a GPU."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    records = []
    with progress_bar() as bar:
        for workload in bar.track(workloads(device), description="linear"):
            records.append(record(workload, device, rounds))
    report: dict[str, Any] = {"question": "linear", "machine": describe_machine(), "measurements": records}
    if device == "cuda":
        report["copy_gbytes_per_s"] = gpu_decode.copy_bandwidth(rounds)
    else:
        report["limits"] = measure_peaks(get_num_threads())._asdict()
    show(report)
    write_record(output / ("linear_gpu.json" if device == "cuda" else "linear_cpu.json"), report)


def workloads(device: str) -> list[LinearWorkload]:
    """Prompts, then single tokens."""
    shapes = [*PROMPTS[device], *((batch_size, 1) for batch_size in STEPS[device])]
    rules = ("gated delta rule", "GLA", "GLA, gates of heads")
    dtypes = [str(dtype).removeprefix("torch.") for dtype in DTYPES[device]]
    return [LinearWorkload(rule, *shape, dtype) for shape in shapes for rule in rules for dtype in dtypes]


def record(workload: LinearWorkload, device: str, rounds: int) -> dict[str, Any]:
    """Times every peer in turns; one that does not serve the call is left out, with its reason."""
    tensors, state = workload.tensors(device)
    calls: dict[str, TimedCall] = {}
    reasons: dict[str, str] = {}
    with torch.no_grad():
        for name, make in PEERS.items():
            try:
                calls[name] = make(workload, tensors, state)
                calls[name]()
            except Exception as error:  # a peer may be missing, or the compiler of its kernel may fail
                calls.pop(name, None)
                reasons[name] = first_line(error) or type(error).__name__
        if device == "cuda":
            seconds = gpu_seconds(workload, calls, rounds)
        else:
            seconds = timing.median_seconds(calls, CPU_SECONDS)
    return {**asdict(workload), "state_bytes": workload.state_bytes, "seconds": seconds, "reasons": reasons}


def gpu_seconds(workload: LinearWorkload, calls: dict[str, TimedCall], rounds: int) -> dict[str, float]:
    """Seconds of each call, and of single tokens in a graph. A slow peer is timed once, after a warm-up call."""
    slow = {name: call for name, call in calls.items() if timing.time_on_device(call) > SLOW_SECONDS}
    seconds = timing.interleaved_on_device({name: call for name, call in calls.items() if name not in slow}, rounds)
    seconds |= {name: timing.time_on_device(call) for name, call in slow.items()}
    if workload.seqlen == 1:
        graphs = {name: gpu_decode.CapturedCalls([call] * 20) for name, call in calls.items() if name in CAPTURED}
        in_graphs = gpu_decode.graph_microseconds(graphs, rounds)
        seconds |= {f"{name}, graph": taken / 1e6 for name, taken in in_graphs.items()}
    return seconds


def ours(workload: LinearWorkload, tensors: list[Tensor], state: Tensor, backend: str = "auto") -> TimedCall:
    """A call of the public functions."""
    arguments: dict[str, Any] = {"initial_state": state, "output_final_state": True, "backend": backend}
    prefix = "chunk" if workload.seqlen > 1 else "recurrent"
    if workload.rule == "gated delta rule":
        function = getattr(linear, f"{prefix}_gated_delta_rule")
        return functools.partial(function, *tensors, use_qk_l2norm_in_kernel=True, **arguments)
    return functools.partial(getattr(linear, f"{prefix}_gla"), *tensors, **arguments)


def by_transformers(workload: LinearWorkload, tensors: list[Tensor], state: Tensor) -> TimedCall:
    """The function of Transformers' models in operations of torch, whatever integration has replaced it."""
    if workload.rule != "gated delta rule":
        raise ValueError("Transformers has the gated delta rule alone")
    module = importlib.import_module("transformers.models.qwen3_next.modeling_qwen3_next")
    form = "chunk" if workload.seqlen > 1 else "recurrent"
    function = inspect.unwrap(getattr(module, f"torch_{form}_gated_delta_rule"))
    *qkv, g, beta = tensors
    return functools.partial(
        function, *qkv, g=g, beta=beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
    )


def by_fla(workload: LinearWorkload, tensors: list[Tensor], state: Tensor) -> TimedCall:
    """flash-linear-attention's kernels."""
    arguments: dict[str, Any] = {"initial_state": state, "output_final_state": True}
    prefix = "chunk" if workload.seqlen > 1 else "fused_recurrent"
    *qkv, g = tensors[:4]
    if workload.rule == "gated delta rule":
        function = getattr(importlib.import_module("fla.ops.gated_delta_rule"), f"{prefix}_gated_delta_rule")
        return functools.partial(function, *qkv, g=g, beta=tensors[4], use_qk_l2norm_in_kernel=True, **arguments)
    if workload.rule == "GLA":
        function = getattr(importlib.import_module("fla.ops.gla"), f"{prefix}_gla")
        name = "g" if workload.seqlen > 1 else "gk"
        return functools.partial(function, *qkv, **{name: g}, **arguments)
    function = getattr(importlib.import_module("fla.ops.simple_gla"), f"{prefix}_simple_gla")
    return functools.partial(function, *qkv, g=g, **arguments)


PEERS: dict[str, Callable[[LinearWorkload, list[Tensor], Tensor], TimedCall]] = {
    OURS: ours,
    "fla": by_fla,
    "Transformers": by_transformers,
    "torch": functools.partial(ours, backend="torch"),
}
CAPTURED = (OURS, "fla")  # peers that are also captured in CUDA graphs


def show(report: dict[str, Any]) -> None:
    """Print milliseconds, and GB/s of states that are read and written."""
    names = list(dict.fromkeys(name for one in report["measurements"] for name in one["seconds"]))
    table = Table("rule", "batch x tokens", "dtype", *(f"{name}, ms" for name in names), "GB/s of states")
    for one in report["measurements"]:
        times = (f"{1e3 * one['seconds'][name]:.3f}" if name in one["seconds"] else "" for name in names)
        rate = (
            2e-9 * one["state_bytes"] / one["seconds"][OURS] if one["seqlen"] == 1 and OURS in one["seconds"] else None
        )
        shape = f"{one['batch_size']} x {one['seqlen']}"
        table.add_row(one["rule"], shape, one["dtype"], *times, "" if rate is None else f"{rate:.0f}")
    OUTPUT.print(table)
    show_reasons(report)
