"""`fastattention plan offload`: predicts which layers keep their cache in host memory, and the time per token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from fastattention.cli.bench.report import in_words
from fastattention.cli.console import OUTPUT
from fastattention.cli.plan.models import find_shape
from fastattention.cli.plan.picture import check_output
from fastattention.offload.hardware import find_hardware
from fastattention.offload.placement import Placement, StepPrediction, place
from fastattention.sizes import format_bytes, read_bandwidth, read_bytes

NOTE = "Every time is predicted from bandwidths, none is measured. docs/internals/long-contexts.md has the model."


@dataclass(frozen=True)
class OffloadOptions:
    """The options of the command; memory and bandwidths as the user wrote them."""

    model: str
    hardware: str
    seqlen: int
    batch_size: int
    tp: int
    gpu_memory: str
    cpu_memory: str | None  # memory of the whole host
    policy: str
    num_layers_cpu: int | None
    quantized: bool
    bandwidths: dict[str, str]  # values that replace fields of the preset's Hardware


def plan(options: OffloadOptions, output: Path | None) -> None:
    """Print the placement, and draw predicted times to `output` if given. Raises ArgumentError for a wrong option."""
    if output is not None:
        check_output(output)
    placement_of = read(options)
    placement = placement_of(options.seqlen, options.policy)
    OUTPUT.print(_summary(placement, options))
    OUTPUT.print(_strip(placement))
    OUTPUT.print(_memory(placement))
    OUTPUT.print(_policies(placement))
    for policy, prediction in placement.predictions.items():
        if prediction.reason is not None:
            OUTPUT.print(f"{policy.value}: {prediction.reason}", soft_wrap=True, markup=False)
    if output is not None:
        from fastattention.cli.plan.offload_picture import write_picture  # needs an extra

        write_picture(placement, placement_of, output)
        OUTPUT.print(f"picture: {output}", soft_wrap=True, markup=False)
    OUTPUT.print(NOTE)


def read(options: OffloadOptions) -> Callable[[int, str], Placement]:
    """The plan of one GPU, by seqlen and policy. Raises ArgumentError, naming the option, for a wrong one."""
    bandwidths: dict[str, Any] = {
        name: float(read_bandwidth(name, value)) for name, value in options.bandwidths.items()
    }
    hardware = replace(find_hardware(options.hardware), **bandwidths).shared(options.tp)
    model = find_shape(options.model).sharded(options.tp)
    gpu_memory = read_bytes("gpu_memory", options.gpu_memory)
    cpu_memory = None if options.cpu_memory is None else read_bytes("cpu_memory", options.cpu_memory) // options.tp
    return lambda seqlen, policy: place(
        model,
        hardware,
        batch_size=options.batch_size,
        seqlen=seqlen,
        gpu_memory=gpu_memory,
        cpu_memory=cpu_memory,
        policy=policy,
        num_layers_cpu=options.num_layers_cpu,
        quantized=options.quantized,
    )


def _summary(placement: Placement, options: OffloadOptions) -> Table:
    table = Table(title="Plan", title_justify="left", title_style="bold", box=box.SIMPLE, show_header=False)
    hardware = placement.hardware
    rates = {
        "GPU memory": hardware.gpu_bandwidth,
        "link": hardware.link_bandwidth,
        "CPU attention": hardware.cpu_bandwidth,
        "host memory": hardware.dram_bandwidth,
    }
    gpus = f", one of {options.tp} GPUs" if options.tp > 1 else ""
    cache = ", quantized on the CPU" if placement.quantized else ""
    rows = {
        "model": f"{placement.model.name}{gpus}, {placement.batch_size} x {placement.seqlen} tokens{cache}",
        "assumed GB/s": ", ".join(f"{name} {rate / 1e9:.4g}" for name, rate in rates.items()),
        "policy": placement.policy.value,
        "layers": f"{placement.num_layers_gpu} on the GPU, {placement.num_layers_cpu} on the CPU",
    }
    if placement.policy.uploads:
        rows["uploaded a token"] = f"{placement.upload_fraction:.0%} of the layers on the CPU"
    rows["predicted time a token"] = in_words(placement.seconds)
    if placement.batch_size > 1 and placement.num_layers_cpu:
        rows["in two halves at once"] = f"{in_words(placement.seconds_in_halves)} (MicroBatchedCache)"
    rows["longest sequence"] = _tokens(placement.predictions[placement.policy])
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _strip(placement: Placement) -> Text:
    """One letter for each layer, from the first to the last."""
    strip = Text("  layers  ")
    for layer, on_cpu in enumerate(placement.on_cpu):
        windowed = layer in placement.model.window_layers
        strip.append(*(("C", "bold yellow") if on_cpu else ("w", "cyan") if windowed else ("G", "green")))
    strip.append(
        "\n  C: cache in host memory, G: on the GPU" + (", w: window" if placement.model.window_layers else "")
    )
    return strip.append("\n")


def _memory(placement: Placement) -> Table:
    table = Table(title="Memory of a GPU", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("where")
    table.add_column("for")
    table.add_column("size", justify="right")
    memory = placement.memory
    parts = {
        "weights": memory.weights,
        "workspace": memory.workspace,
        "keys and values": memory.resident_kv,
        "keys and values of windows": memory.window_kv,
        "keys of indexers": memory.indexer,
        "staging of uploads": memory.staging,
        "newest pages of layers on the CPU": memory.newest_pages,
        "all": memory.gpu,
    }
    for part, size in parts.items():
        if size:
            table.add_row("GPU", part, format_bytes(size))
    table.add_row("host", "keys and values", format_bytes(memory.cpu_kv))
    return table


def _policies(placement: Placement) -> Table:
    table = Table(title="Policies, predicted", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("policy")
    for heading in ("on the CPU", "time a token", "longest sequence"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for policy, prediction in placement.predictions.items():
        seconds = "" if prediction.seconds is None else in_words(prediction.seconds)
        layers = "" if prediction.seconds is None else str(prediction.num_layers_cpu)
        chosen = "chosen" if policy is placement.policy else ""
        table.add_row(policy.value, layers, seconds, _tokens(prediction), chosen)
    return table


def _tokens(prediction: StepPrediction) -> str:
    if prediction.longest_seqlen is None:
        return "as host memory allows"
    return str(prediction.longest_seqlen)
