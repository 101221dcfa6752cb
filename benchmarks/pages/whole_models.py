"""The page of whole models."""

from __future__ import annotations

from statistics import median
from typing import Any

from .markdown import number, page, ratio, table, tokens
from .results import Result

EAGER, SDPA, OURS = "eager", "sdpa", "fast_attention"
# Models in the order of the page. Models of 8 ranks are one rank's share, whose GPU does not communicate.
ON_GPUS = tuple(
    f"h100/model_{name}"
    for name in ("llama-2-7b", "llama-3-8b", "llama-2-70b-of-8", "pangu-38b-of-8", "pangu-71b-of-8")
)
ON_CPUS = ("xeon_amx/model_llama-2-7b",)
INTRODUCTION = """\
A model of Transformers with random weights, by each of its attentions in turns. Tokens a second are those of all
sequences together, in the median round after the first. Ratios say how many times as fast `fast_attention` is; **bold**
ratios are losses. "First" is the first round: where shapes are new, `sdpa` waits for plans of cuDNN's. In the first
line of a model ours also compiled its kernels. A model "/8" is one rank's share of eight, on a GPU that does not
communicate. The sizes of PanGu are our guesses, since they are not published."""
GLANCE = """\
Ratios over all cells of a model: lowest, median, highest; "vs eager" at 1 x 2K and 1 x 8K. The host is a virtual
machine. Its times vary by 10% and more from cell to cell, and are all that a decode without graphs takes."""
PREFILL = """\
Long prompts go to cuDNN in both `sdpa` and `fast_attention`
([decision](../decisions/0054-prefill-by-cudnn-on-hopper.md))."""
DECODE = """\
Tokens one by one after the prompt, with a DynamicCache, which has a new length in every step. Until the cache is long
this is the host's time: a step calls some 700 operations from Python. Once cuDNN's plans exist, `fast_attention` takes
about 10 microseconds a layer longer than `sdpa`
([decision](../decisions/0058-keep-the-memory-of-a-stream-between-decodes.md)). Where a length is new, `sdpa` waits for
a plan, and the first round is what is felt."""
BEFORE = """\
It was measured before that decision, and its figures are means of steps, not medians: a disturbed step counts."""
MEAN_OF_STEPS = ("pangu-71b/8",)
GRAPH = """\
Tokens one by one with a StaticCache, each step replayed from one CUDA graph: how models are served. Before
[0055](../decisions/0055-decode-whatever-leaves-multiprocessors-idle.md) such a step took up to 13 times as long."""
CPU = """\
The other products of a model of this width leave little to attention. Below 2K tokens the three differ by less than the
rounds of one do, up to 25% on this machine."""
MEMORY = "Peak of a prefill, weights included, in GB."


def build() -> str:
    """whole-models.md."""
    on_gpus, on_cpus = ([Result.load(name) for name in names] for names in (ON_GPUS, ON_CPUS))
    blocks = [INTRODUCTION, "## At a glance", GLANCE, _glance(on_gpus), _glance_source(on_gpus)]
    for result in on_gpus:
        blocks += _on_gpu(result)
    for result in on_cpus:
        blocks += _on_cpu(result)
    return page("Whole models", *blocks)


def _glance(results: list[Result]) -> str:
    rows = []
    for result in results:
        model = f"{result.data['model']}, {result.data['num_layers']} layers"
        at = [_ratios(result, "prefill", EAGER, cells=((1, seqlen),))[0] for seqlen in (2048, 8192)]
        ranges = [_range(_ratios(result, what, SDPA)) for what in ("prefill", "decode", "graphed_decode")]
        rows.append([model, ranges[0], f"{ratio(at[0])}, {ratio(at[1])}", *ranges[1:]])
    headings = ["model", "prefill vs sdpa", "prefill vs eager", "decode vs sdpa", "decode in graphs vs sdpa"]
    return table(headings, rows)


def _glance_source(results: list[Result]) -> str:
    devices = ", ".join(dict.fromkeys(result.gpu for result in results))
    versions = ", ".join(dict.fromkeys(f"torch {result.machine['versions']['torch']}" for result in results))
    return (
        f"<small>Device: {devices}. Versions: {versions}. Commit: that of each model below. Command: that "
        "of each model. Data: that of each model.</small>"
    )


def _ratios(result: Result, what: str, other: str, cells: tuple[tuple[int, int], ...] = ()) -> list[float]:
    found = []
    for row in result.data["rows"]:
        if not cells or (row["batch_size"], row["seqlen"]) in cells:
            over = _over(*(_steady(row["figures"][name][what]) for name in (other, OURS)))
            found += [] if over is None else [over]
    return found


def _range(ratios: list[float]) -> str:
    return f"{ratio(min(ratios))}, {ratio(median(ratios))}, {ratio(max(ratios))}"


def _on_gpu(result: Result) -> list[str]:
    model = result.data["model"]
    decode = f"{DECODE} {BEFORE}" if model in MEAN_OF_STEPS else DECODE
    return result.sourced(
        f"## {_title(result)}, {result.gpu}",
        f"### {model}: prefill",
        PREFILL,
        _rates(result, "prefill"),
        f"### {model}: decode",
        decode,
        _rates(result, "decode"),
        f"### {model}: decode in CUDA graphs",
        GRAPH,
        _rates(result, "graphed_decode", with_first=False),
        f"### {model}: memory",
        MEMORY,
        _memory(result),
    )


def _on_cpu(result: Result) -> list[str]:
    return result.sourced(
        f"## {_title(result)}, {result.processor}",
        CPU,
        "Prefill:",
        _rates(result, "prefill", with_first=False),
        "Decode:",
        _rates(result, "decode", with_first=False),
        MEMORY,
        _memory(result),
    )


def _title(result: Result) -> str:
    return f"{result.data['model']}, {result.data['num_layers']} layers, {result.data['dtype']}"


def _rates(result: Result, what: str, with_first: bool = True) -> str:
    rows = []
    for row in result.data["rows"]:
        sequences = row["batch_size"] * (row["seqlen"] if what == "prefill" else 1)
        steady = {name: _steady(found[what]) for name, found in row["figures"].items()}
        cells = [_case(row)]
        for name in (EAGER, SDPA, OURS):
            taken = steady[name]
            cells.append("out of memory" if taken is None else _tokens_a_second(sequences / taken))
        cells += [ratio(_over(steady[name], steady[OURS])) for name in (EAGER, SDPA)]
        if with_first:
            first = [row["figures"][name][what][0] for name in (SDPA, OURS)]
            cells += [*(number(1e3 * taken) for taken in first), ratio(first[0] / first[1])]
        rows.append(cells)
    headings = ["batch x tokens", EAGER, SDPA, OURS, "vs eager", "vs sdpa"]
    return table([*headings, *(["first, sdpa, ms", "first, ours, ms", "vs sdpa"] if with_first else [])], rows)


def _tokens_a_second(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else number(rate)


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
