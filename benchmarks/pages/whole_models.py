"""The page of whole models."""

from __future__ import annotations

from statistics import median
from typing import Any

from .markdown import number, page, ratio, table, tokens
from .results import Result

EAGER, SDPA, OURS = "eager", "sdpa", "fast_attention"
INTRODUCTION = """\
A model of Transformers with random weights, by each of its attentions in turns. Tokens a second are those of all
sequences together, in the median round after the first. Ratios say how many times as fast `fast_attention` is; **bold**
ratios are losses. "First" is the first round: where shapes are new, `sdpa` waits for plans of cuDNN's. In the first
line ours also compiled its kernels."""
PREFILL = """\
Long prompts go to cuDNN in both `sdpa` and `fast_attention`
([decision](../decisions/0054-prefill-by-cudnn-on-hopper.md))."""
DECODE = """\
Tokens one by one after the prompt, with a DynamicCache, which has a new length in every step. Until the cache is long
this is the host's time: a step calls some 700 operations from Python. Once cuDNN's plans exist, `fast_attention` is
behind, because its function takes about 30 microseconds a layer longer than `sdpa`'s on this host. Where a length is
new, `sdpa` waits for a plan, and the first round is what is felt. In 1 x 16K one of the two rounds was disturbed (19.1
and 24.8 ms)."""
GRAPH = """\
Tokens one by one with a StaticCache, each step replayed from one CUDA graph: how models are served. Before
[0055](../decisions/0055-decode-whatever-leaves-multiprocessors-idle.md) such a step took up to 13 times as long."""
MEMORY = "Peak of a prefill, weights included, in GB."


def build() -> str:
    """whole-models.md."""
    result = Result.load("h100/model_llama-2-7b")
    where = f"{result.data['model']}, {result.data['num_layers']} layers, {result.data['dtype']}, {result.gpu}"
    source = result.provenance(result.gpu)
    return page(
        "Whole models",
        INTRODUCTION,
        f"## {where}: prefill",
        PREFILL,
        _rates(result, "prefill"),
        source,
        f"## {where}: decode",
        DECODE,
        _rates(result, "decode"),
        source,
        f"## {where}: decode in CUDA graphs",
        GRAPH,
        _rates(result, "graphed_decode", with_first=False),
        source,
        f"## {where}: memory",
        MEMORY,
        _memory(result),
        source,
    )


def _rates(result: Result, what: str, with_first: bool = True) -> str:
    rows = []
    for row in result.data["rows"]:
        sequences = row["batch_size"] * (row["seqlen"] if what == "prefill" else 1)
        steady = {name: _steady(found[what]) for name, found in row["figures"].items()}
        cells = [_case(row)]
        for name in (EAGER, SDPA, OURS):
            taken = steady[name]
            cells.append("out of memory" if taken is None else f"{sequences / taken:,.0f}")
        cells += [ratio(_over(steady[name], steady[OURS])) for name in (EAGER, SDPA)]
        if with_first:
            first = [row["figures"][name][what][0] for name in (SDPA, OURS)]
            cells += [*(number(1e3 * taken) for taken in first), ratio(first[0] / first[1])]
        rows.append(cells)
    headings = ["batch x tokens", EAGER, SDPA, OURS, "vs eager", "vs sdpa"]
    return table([*headings, *(["first, sdpa, ms", "first, ours, ms", "vs sdpa"] if with_first else [])], rows)


def _steady(seconds: list[float]) -> float | None:
    return median(seconds[1:]) if len(seconds) > 1 else None


def _over(other: float | None, ours: float | None) -> float | None:
    return None if other is None or ours is None else other / ours


def _memory(result: Result) -> str:
    rows = []
    for row in result.data["rows"]:
        peaks = [row["figures"][name]["peak_bytes"] for name in (EAGER, SDPA, OURS)]
        rows.append([_case(row), *("out of memory" if peak is None else number(peak / 1e9) for peak in peaks)])
    return table(["batch x tokens", EAGER, SDPA, OURS], rows)


def _case(row: dict[str, Any]) -> str:
    return f"{row['batch_size']} x {tokens(row['seqlen'])}"
