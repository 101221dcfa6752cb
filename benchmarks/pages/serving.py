"""The page of serving: continuous batching, vLLM, and a server under load."""

from __future__ import annotations

import json
from statistics import median
from typing import Any

from .markdown import number, page, ratio, seconds, table
from .results import SOURCE, Result

INTRODUCTION = """\
Random weights, random prompts whose lengths grow in equal steps, greedy tokens, and the same number of new tokens for
every request. All requests come at once. Rates are new tokens a second, from the first request to the last token;
medians of rounds in which all lines take turns."""
BATCHING = """\
The best of each one's settings counts. "Beside" is memory beyond weights and cache at the peak: ours grows with the
tokens of a batch, `sdpa`'s masks with those times the tokens of all requests."""
BOUNDS = """\
Bounds: the products of the prompts with the weights at the rate of one large product take {prefill}. Reading the
weights once a token, and the keys and values of every request once a token of its own, takes {decode} at the rate of
reading memory."""
VLLM = """\
vLLM {version} for CPUs on the same load, without its compiler: with [our plugin]({plugin}) {ours} new tokens a second,
with its own attention {theirs}, {ratio}. The second of two equal loads of a process; processes in turns
(`python benchmarks/serving_vllm.py`)."""
PLUGIN = f"{SOURCE}/plugins/vllm/README.md"
SOAK = """\
{requests} requests by {clients} clients at a time in {minutes} to `fastattention serve`, with a model of about 6M
parameters: {ends}. None was lost, none got another answer than it should. Resident memory was {first} at most in the
first minute, {peak} at most afterwards."""

LOAD = """\
Random weights, prompts of 1 to {longest} tokens, {new} new tokens each, {dtype}. Each client asks for the next answer
as soon as it has the last. Beside it, Transformers' `generate_batch` with as many requests at a time, in turns with the
server: what the same batch gives without HTTP. Rates are new tokens a second, medians of rounds."""

HOST = """\
On a GPU `generate_batch` prepares a step while the last one runs. The server needs the tokens of a step before it
prepares the next, as grammars and stop strings depend on them, so the GPU waits for its host work. That work grows
with the answers: on a core of an AMD EPYC a step of 64 took 3.3 ms beside forward pass and choice of tokens, one of 128
took 6.0 ms. Transformers' scheduler took 3.9 ms of these. A larger cache did not help."""

FAIRNESS = """\
{clients} clients stream answers, and one more asks about a prompt of {long} tokens. Medians of rounds."""

EAGER = """\
On the GPU steps of answers alone are CUDA graphs. Steps that read prompts are not: their host time alone is several
steps of answers, so shorter chunks would not bring the tokens much closer together."""

GRAPHS = {
    "true": ", CUDA graphs of all steps",
    "[false, true]": ", CUDA graphs of steps without prompts (default)",
    "false": ", no CUDA graphs",
    "null": "",
}


def build() -> str:
    """serving.md."""
    blocks = [INTRODUCTION]
    for name, title in (("serving_cpu", "CPU: 100M parameters"), ("serving_gpu", "GPU: the shape of LLaMA-3-8B")):
        result = Result.load(name)
        blocks += result.sourced(f"## {title}", *batching(result.data))
    for name, title in (("serving_load_cpu", "CPU: 100M parameters"), ("serving_load_gpu", "GPU: 1B parameters")):
        result = Result.load(name)
        blocks += result.sourced(f"## The server on a {title}", *load(result.data))
    blocks.append(HOST)
    blocks.append("## While a long prompt is read")
    for name, title in (
        ("serving_fairness_cpu", "CPU: 100M parameters"),
        ("serving_fairness_gpu", "GPU: 1B parameters"),
    ):
        result = Result.load(name)
        blocks += result.sourced(f"### {title}", *fairness(result.data))
    blocks.append(EAGER)
    result = Result.load("serving_soak")
    blocks += ["## A server under load", soak(result.data), result.provenance(result.device)]
    return page("Serving", *blocks)


def batching(data: dict[str, Any]) -> list[str]:
    """Tokens a second by each setting, beside the bounds."""
    rates = {_rate(data, one): one for one in data["records"]}
    best = {
        name: max(rate for rate, one in rates.items() if one["implementation"] == name)
        for name in ("fast_attention", "sdpa")
    }
    rows = []
    for rate, one in rates.items():
        settings = one["settings"]
        graphs = GRAPHS[json.dumps(settings.get("use_cuda_graph"))]
        beside = f"{one['peak_bytes'] / 1e6:.0f}"
        line = f"`{one['implementation']}`, {settings['max_batch_tokens']} tokens a batch{graphs}"
        rows.append([line, number(rate), beside, f"{rate / best['sdpa']:.2f}x"])
    what = (
        f"{data['requests']} requests of {data['prompts'][0]} to {data['prompts'][1]} tokens, {data['prompt_tokens']} "
        f"in all, {data['new_tokens']} new tokens each, {data['dtype'].removeprefix('torch.')}. {BATCHING}"
    )
    headings = ["continuous batching with", "new tokens a second", "beside, MB", "vs the best of `sdpa`"]
    bounds = BOUNDS.format_map({name: seconds(value) for name, value in data["bounds"].items()})
    taken = seconds(data["requests"] * data["new_tokens"] / best["fast_attention"])
    blocks = [what, table(headings, rows), f"{bounds} Ours took {taken}."]
    if "vllm" in data:
        ours, theirs = (data["vllm"]["rates"][name] for name in ("vLLM with the plugin", "vLLM"))
        texts = {"ours": number(ours), "theirs": number(theirs), "ratio": ratio(ours / theirs)}
        blocks.append(VLLM.format_map({**texts, "version": data["vllm"]["version"], "plugin": PLUGIN}))
    return blocks


def load(data: dict[str, Any]) -> list[str]:
    """Tokens a second of the server by the number of clients, beside those of a batch."""
    rows = []
    for one in data["records"]:
        tokens = one["requests"] * data["new_tokens"]
        server, batch = (tokens / median(one["seconds"][name]) for name in ("server", "batch"))
        rows.append([str(one["clients"]), number(server), number(batch), ratio(server / batch)])
    what = LOAD.format(longest=data["longest"], new=data["new_tokens"], dtype=data["dtype"].removeprefix("torch."))
    return [what, table(["clients", "server", "`generate_batch`", "server / batch"], rows)]


def fairness(data: dict[str, Any]) -> list[str]:
    """Times between tokens before and while a long prompt is read."""

    def middle(name: str, of: str) -> float:
        return float(median(one[name][of] for one in data["records"]))

    rows = [
        [words, *(seconds(middle(name, of)) for of in ("median", "p99", "longest")),
         f"{middle(name, 'median') / middle('before', 'median'):.2f}"]
        for name, words in (("before", "before"), ("during", "while it is read"))
    ]  # fmt: skip
    beside, alone = (seconds(median(one[name] for one in data["records"])) for name in ("beside", "alone"))
    headings = ["between two tokens", "median", "99% within", "longest", "median / before"]
    what = f"{FAIRNESS.format_map(data)} Reading the prompt took {beside} beside the streams, {alone} alone."
    return [what, table(headings, rows)]


def _rate(data: dict[str, Any], one: dict[str, Any]) -> float:
    """New tokens a second."""
    return float(data["requests"] * data["new_tokens"] / median(one["seconds"]))


def soak(data: dict[str, Any]) -> str:
    """How requests ended, and what the server took."""
    kinds = {"whole": "whole answers", "stream": "streams", "left": "streams that were left", "nonsense": "nonsense"}
    ends = ", ".join(f"{data['ends'][kind]} {name}" for kind, name in kinds.items())
    return SOAK.format(
        requests=data["requests"], clients=data["clients"], minutes=seconds(data["seconds"]), ends=ends,
        first=f"{data['peak_bytes_first_minute'] / 1e6:.0f} MB", peak=f"{data['peak_bytes'] / 1e6:.0f} MB",
    )  # fmt: skip
