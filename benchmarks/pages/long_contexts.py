"""The page of caches that are shared by a GPU and its host."""

from __future__ import annotations

from typing import Any

from .chart import Bar, Chart, Group
from .markdown import number, page, ratio, table, tokens
from .results import Result

POLICIES = ("classical", "cooperative", "hybrid")
MODELS = {
    "llama-3-8b": "LLaMA-3-8B",
    "llama-2-7b": "LLaMA-2-7B",
    "pangu-38b/8": "PanGu-38B, one rank of 8",
}
INTRODUCTION = """\
A decoder of random weights in bfloat16, one sequence, under a budget of GPU memory that leaves the given number of
layers in host memory. Policies take turns; figures are medians of steps. "Classical" is our own baseline: pinned
memory, read ahead, double-buffered. In brackets stands what the planner predicted from the bandwidths measured before
each row. Host memory bandwidth is the limit, and hosts differ: two sets of tables come from two hosts of one kind, both
virtual machines. At 32K keys of LLaMA-3-8B a thread in Python holds the hybrid up. **Bold** ratios are losses. Keys and
values are random, not computed from a prompt, except in the last table. No V100 has been measured."""

GENERATE = """\
Models of Transformers with random weights and a `FastAttentionCache`; the prompt is computed in chunks of 8,192 tokens.
The weights of LLaMA-3-8B leave 1 GiB of 16, where the chunks have 2,048. PanGu-38B is one rank's share of eight: the
GPU stands for one of 8, does not communicate, and has the whole host to itself. Its sizes are our guesses, since
they are not published. Plans are by bandwidths measured in the same process. Steps take 1.2 to 1.3 times as long as
planned. About half of the difference is Python's: the plan assumes 100 microseconds a layer beside its reads, and a
layer of Transformers takes some 550 on this host."""


def build() -> str:
    """long-contexts.md."""
    blocks = [INTRODUCTION, "![Policies against classical uploads](../assets/long-contexts.svg)"]
    for title, name in (("the slower host", "long_context"), ("the faster host", "faster_host/long_context")):
        result = Result.load(name)
        blocks += result.sourced(*sections(title, result.data), device=_gpu_and_host(result))
    result = Result.load("long_generate")
    called = result.sourced(generated(result.data["rows"]), device=_gpu_and_host(result))
    return page("Long contexts", *blocks, "## A whole call of `generate`", GENERATE, *called)


def sections(title: str, data: dict[str, Any]) -> list[str]:
    """Steps, what they were predicted from, and caches that are not shared. title: of the host."""
    return [
        f"## Milliseconds a token, {title}",
        _steps(data["rows"]),
        f"### Bandwidths and memory, {title}",
        *_bandwidths(data),
        f"### All layers on the GPU, and Transformers' offloaded cache, {title}",
        *_extremes(data["rows"]),
    ]


def build_chart() -> str:
    """long-contexts.svg: both policies relative to classical, on the slower host."""
    result = Result.load("long_context")
    groups = []
    for policy, how in (("cooperative", "the CPU attends"), ("hybrid", "the CPU attends, the GPU uploads the rest")):
        gains = [(row, row["seconds"]["classical"] / row["seconds"][policy]) for row in _shared(result.data["rows"])]
        bars = [Bar(MODELS[row["model"]], _case(row).partition(", ")[2], gain) for row, gain in gains]
        groups.append(Group(policy.capitalize(), how, bars))
    return Chart(
        "What the CPU adds to a long context",
        "Decode relative to double-buffered uploads of the cache (classical)",
        (0.8, 1, 1.5, 2, 2.5),
        groups,
        (f"Labels: keys, layers on the CPU. {result.gpu}, host {result.processor}, the slower of two hosts.",),
    ).svg()


def _gpu_and_host(result: Result) -> str:
    return f"{result.gpu}, host {result.processor}"


def _shared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["num_layers_cpu"]]


def _steps(measured: list[dict[str, Any]]) -> str:
    rows = []
    for row in _shared(measured):
        taken, predicted = row["seconds"], row["predicted"]
        times = [f"{number(1e3 * taken[policy])} ({number(1e3 * predicted[policy])})" for policy in POLICIES]
        gains = [ratio(taken["classical"] / taken[policy]) for policy in POLICIES[1:]]
        rows.append([_case(row), *times, *gains])
    headings = [f"{policy}, ms (predicted)" for policy in POLICIES]
    return table(["model, keys, layers on the CPU", *headings, "cooperative vs classical", "hybrid vs classical"], rows)


def _case(row: dict[str, Any]) -> str:
    stored = ", int8 in host memory" if row["quantized"] else ""
    return f"{MODELS[row['model']]}, {tokens(row['seqlen'])}, {row['num_layers_cpu']}{stored}"


def _bandwidths(data: dict[str, Any]) -> list[str]:
    rows = []
    for row in _shared(data["rows"]):
        hardware = row["hardware"]
        rates = [number(hardware[f"{name}_bandwidth"] / 1e9) for name in ("link", "cpu", "dram")]
        memory = [number(row[name] / 2**30) for name in ("kv_gpu_bytes", "kv_cpu_bytes", "gpu_peak_bytes")]
        difference = max(row["difference"].values())
        rows.append([_case(row), *rates, *memory, f"{difference:.1%}"])
    reads = data["cpu_read_bytes_per_s"]
    by_threads = ", ".join(f"{number(rate / 1e9)} with {count}" for count, rate in reads.items())
    headings = ["model, keys, layers on the CPU", "link, GB/s", "CPU attention, GB/s", "both together, GB/s"]
    headings += ["cache on the GPU, GiB", "in host memory, GiB", "GPU peak, GiB", "difference from classical"]
    what = f"A loop that only reads host memory reaches, in GB/s by threads: {by_threads}."
    more = "The difference is the largest one of the last hidden state, relative to its largest element."
    return [what, more, table(headings, rows)]


def _extremes(measured: list[dict[str, Any]]) -> list[str]:
    rows = []
    for row in measured:
        resident, transformers = row["seconds"].get("resident"), row.get("transformers_seconds")
        if resident or transformers:
            cells = [f"{number(1e3 * taken)}" if taken else "-" for taken in (resident, transformers)]
            rows.append([f"{MODELS[row['model']]}, {tokens(row['seqlen'])}", *cells])
    what = "Transformers' offloaded cache keeps all layers in host memory; it was measured where six copies of it fit."
    return [what, table(["model, keys", "all layers on the GPU, ms", "Transformers' offloaded cache, ms"], rows)]


def generated(calls: list[dict[str, Any]]) -> str:
    """Whole calls of generate, beside their plans."""
    rows = []
    for row in calls:
        memory = [number(row[name] / 2**30) for name in ("kv_gpu_bytes", "kv_cpu_bytes", "gpu_peak_bytes")]
        planned = row["plan"]
        step = f"{number(1e3 * row['seconds_per_token'])} ({number(1e3 * planned['seconds_per_token'])})"
        shape = f"{MODELS[row['model']]}, {tokens(row['prompt'])} tokens, {row['gpu_memory']} of GPU memory"
        layers = f"{row['policy']}, {row['num_layers_cpu']} ({planned['num_layers_cpu']})"
        rows.append([shape, layers, number(row["prefill_seconds"]), step, *memory])
    headings = ["model, prompt, budget", "policy, layers on the CPU (planned)", "prompt, s", "ms a token (planned)"]
    headings += ["cache on the GPU, GiB", "in host memory, GiB", "GPU peak, GiB"]
    return table(headings, rows, text_columns=2)
