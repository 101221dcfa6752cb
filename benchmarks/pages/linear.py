"""The page of linear attention: prompts and single tokens, on a CPU and on a GPU, and a whole model on CPUs."""

from __future__ import annotations

from typing import Any

from . import results
from .cpu import tokens_of_models
from .markdown import number, page, percent, ratio, seconds, table, tokens
from .results import Result

OURS, FLA, TRANSFORMERS, TORCH = "fastattention", "fla", "Transformers", "torch"
FILES = {"linear_cpu": "On a CPU", "linear_gpu": "On a GPU"}
MODELS = ("decode_in_hybrid_model", "xeon_amx/decode_in_hybrid_model")
INTRODUCTION = """\
Every rule with 16 heads of 128 x 128, and a state before and after. Heads of Mamba-2 share their queries and keys.
Peers are the functions of Transformers' models, flash-linear-attention ("fla") where it runs, and our own fallback in
operations of torch. fla runs Mamba-2 as its GLA with gates of heads. Calls take turns in one process; **bold** ratios
are losses. The [guide](../guides/linear-attention.md) says how to call it."""
PROMPTS = "Whole prompts, by the chunked functions:"
TRAINING = "Training, a forward and its backward:"
STEPS = """\
One token for each sequence, by the recurrent functions. A state is read and written once; its rate counts
both.{limit}"""
OF_CPU = """\
 Memory is read here at {read:.0f} GB/s, from memory far larger than the caches; small batches stay in caches."""
OF_GPU = """\
 "In a graph" is the same call replayed from a CUDA graph, without the time of the processor. A copy within the GPU
reaches {copy:.0f} GB/s; the states of small batches stay in the L2 cache."""

OF_MODELS = """\
Transformers with a hybrid of the kind of Granite 4, {parameters:.0f} million parameters with random weights: 28 layers
of Mamba-2 and 4 of attention. "Transformers" is its own functions of these layers, and SDPA. "Own threads" runs our
thread pool instead of torch's OpenMP threads. "Noise" is Transformers against itself, in turns with the others. Linear
layers are the convolutions and states of a token, without projections, and with Python. All else is the same for
both, most of it products with weights by torch: if linear layers took no time, a token would be {bounds} as fast."""


def build() -> str:
    """linear.md."""
    sections = [block for name, heading in FILES.items() for block in _section(name, heading)]
    return page("Linear attention", INTRODUCTION, *sections, *_models())


def _models() -> list[str]:
    """The section of a whole model; empty where none has been measured."""
    found = [Result.load(name) for name in MODELS if (results.RESULTS / f"{name}.json").exists()]
    blocks = []
    for result in found:
        rows = tokens_of_models(result.data["rows"], TRANSFORMERS, "linear")
        blocks += [f"### {result.processor}", *result.sourced(rows, device=result.processor)]
    if not found:
        return []
    shares = [row["linear_seconds"]["sdpa"] / row["seconds"]["sdpa"] for result in found for row in result.data["rows"]]
    bounds = f"{1 / (1 - min(shares)):.2f} to {1 / (1 - max(shares)):.2f} times"
    about = OF_MODELS.format(parameters=found[0].data["parameters"] / 1e6, bounds=bounds)
    return ["## A token of a whole model", about, *blocks]


def _section(name: str, heading: str) -> list[str]:
    """The section of a device; empty where it has not been measured."""
    if not (results.RESULTS / f"{name}.json").exists():
        return []
    result = Result.load(name)
    on_gpu = bool(result.machine["gpus"])
    records = result.data["measurements"]
    peers = [peer for peer in (FLA, TRANSFORMERS, TORCH) if any(peer in one["seconds"] for one in records)]
    limit = (
        OF_GPU.format(copy=result.data["copy_gbytes_per_s"])
        if on_gpu
        else OF_CPU.format(read=result.data["limits"]["read_gbytes_per_s"])
    )
    prompts, training = (
        [_cells(one, peers) for one in records if one["seqlen"] > 1 and one.get("trains", False) is trains]
        for trains in (False, True)
    )
    steps = [[*_cells(one, peers), *_rate(one, result, on_gpu)] for one in records if one["seqlen"] == 1]
    columns = ["rule", "batch x tokens", "dtype", "ours", *(f"{peer} / ours" for peer in peers)]
    of_states = ["in a graph", "states, GB/s"] if on_gpu else ["states, GB/s", "of reading"]
    return result.sourced(
        f"## {heading}",
        PROMPTS,
        table(columns, prompts, text_columns=3),
        *((TRAINING, table(columns, training, text_columns=3)) if training else ()),
        STEPS.format(limit=limit),
        table([*columns, *of_states], steps, text_columns=3),
    )


def _cells(one: dict[str, Any], peers: list[str]) -> list[str]:
    taken = one["seconds"]
    shape = f"{one['batch_size']} x {tokens(one['seqlen'])}"
    ratios = [ratio(taken[peer] / taken[OURS]) if peer in taken else "-" for peer in peers]
    return [one["rule"], shape, one["dtype"], seconds(taken[OURS]), *ratios]


def _rate(one: dict[str, Any], result: Result, on_gpu: bool) -> list[str]:
    if on_gpu:
        taken = one["seconds"][f"{OURS}, graph"]
        return [seconds(taken), number(2e-9 * one["state_bytes"] / taken)]
    rate = 2e-9 * one["state_bytes"] / one["seconds"][OURS]
    return [number(rate), percent(rate / result.data["limits"]["read_gbytes_per_s"])]
