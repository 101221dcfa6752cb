"""The question "linear": linear attention of prompts, in training and of single tokens, on the GPU or else the CPU.

16 heads of 128 x 128, as flash-linear-attention publishes its figures. Peers: the same in operations of torch, the
functions of Transformers' models, and flash-linear-attention where it is installed (GPU). Medians of calls in turns.
Training is a forward and its backward. On a GPU single tokens are also timed in a CUDA graph, without host time.
linear_peers.py has the calls.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from fastattention.backends.cpu.library import measure_peaks
from fastattention.cli.bench import gpu_decode, timing
from fastattention.cli.bench.gpu import TimedCall, show_reasons
from fastattention.cli.bench.linear_peers import OURS, PEERS, RULES, LinearWorkload, call_of
from fastattention.cli.bench.record import write_record
from fastattention.cli.console import OUTPUT, first_line, progress_bar
from fastattention.cli.machine import describe_machine, installed_version
from fastattention.threads import get_num_threads

OF_FLA = ("flash-linear-attention", "triton")
CAPTURED = (OURS, "fla")  # peers that are also captured in CUDA graphs
CPU_SECONDS = 2.5  # for each workload
SLOW_SECONDS = 0.02  # a call that takes longer on a GPU is not repeated
PROMPTS = {"cuda": ((1, 16384), (8, 2048)), "cpu": ((1, 4096),)}
TRAINING = {"cuda": ((1, 4096), (8, 1024)), "cpu": ((1, 2048),)}  # shorter: peers in operations of torch take seconds
STEPS = {"cuda": (1, 8, 64), "cpu": (1, 8)}
DTYPES = {"cuda": (torch.bfloat16,), "cpu": (torch.float32, torch.bfloat16)}


def answer(rounds: int, output: Path) -> None:
    """Measure, print a table, write linear_gpu.json or linear_cpu.json into `output`. rounds: rounds on a GPU."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    records = []
    with progress_bar() as bar:
        for workload in bar.track(workloads(device), description="linear"):
            records.append(record(workload, device, rounds))
    machine = describe_machine()
    machine["versions"] |= {name: found for name in OF_FLA if (found := installed_version(name))}
    report: dict[str, Any] = {"question": "linear", "machine": machine, "measurements": records}
    if device == "cuda":
        report["copy_gbytes_per_s"] = gpu_decode.copy_bandwidth(rounds)
    else:
        report["limits"] = measure_peaks(get_num_threads())._asdict()
    show(report)
    write_record(output / ("linear_gpu.json" if device == "cuda" else "linear_cpu.json"), report)


def workloads(device: str) -> list[LinearWorkload]:
    """Prompts, training, then single tokens."""
    shapes = [(*shape, False) for shape in PROMPTS[device]] + [(*shape, True) for shape in TRAINING[device]]
    shapes += [(batch_size, 1, False) for batch_size in STEPS[device]]
    dtypes = [str(dtype).removeprefix("torch.") for dtype in DTYPES[device]]
    return [
        LinearWorkload(rule, batch_size, seqlen, dtype, trains)
        for batch_size, seqlen, trains in shapes
        for rule in RULES
        for dtype in dtypes
    ]


def record(workload: LinearWorkload, device: str, rounds: int) -> dict[str, Any]:
    """Times every peer in turns; one that does not serve the call is left out, with its reason."""
    calls: dict[str, TimedCall] = {}
    reasons: dict[str, str] = {}
    with torch.set_grad_enabled(workload.trains):
        for name in PEERS:
            try:
                calls[name] = call_of(name, workload, device)
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


def show(report: dict[str, Any]) -> None:
    """Print milliseconds, and GB/s of states that are read and written."""
    names = list(dict.fromkeys(name for one in report["measurements"] for name in one["seconds"]))
    table = Table("rule", "batch x tokens", "dtype", *(f"{name}, ms" for name in names), "GB/s of states")
    for one in report["measurements"]:
        times = (f"{1e3 * one['seconds'][name]:.3f}" if name in one["seconds"] else "" for name in names)
        rate = (
            2e-9 * one["state_bytes"] / one["seconds"][OURS] if one["seqlen"] == 1 and OURS in one["seconds"] else None
        )
        shape = f"{one['batch_size']} x {one['seqlen']}" + (", training" if one["trains"] else "")
        table.add_row(one["rule"], shape, one["dtype"], *times, "" if rate is None else f"{rate:.0f}")
    OUTPUT.print(table)
    show_reasons(report)
