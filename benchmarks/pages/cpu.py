"""The page of CPU figures."""

from __future__ import annotations

import re
from itertools import groupby
from typing import Any

from .markdown import number, page, percent, ratio, seconds, table, tokens
from .results import Result

OURS = "fastattention"
# Names of the result files, and their names on the page.
HEADINGS = {
    "fastattention, packed cache": "`PackedKVStore`",
    "fastattention, tokens first": "ours, tokens first",
    "torch SDPA": "vs SDPA",
    "torch SDPA folded": "vs SDPA, heads folded",
    "torch SDPA loop": "vs SDPA in a loop",
    "torch SDPA padded": "vs SDPA with padding",
    "torch matmul": "vs torch matmul",
    "torch eager": "vs eager torch",
    "OpenVINO": "vs OpenVINO",
    "ggml": "vs ggml",
}
INTRODUCTION = """\
Each figure is a median of calls that take turns with every peer in one process, on a shared virtual machine whose speed
drifts by about 10%. "Of limit" compares with what the same processor reached in a loop of multiply-adds or of memory
reads, in the same run. That loop reads one stream of small pages, so a call can exceed 100%.
A ratio says how many times as fast as the peer we are; **bold** ratios are losses. 64-bit Arm has been run under
emulation only, so there are no figures of it."""


def build() -> str:
    """cpu.md."""
    return page("CPU", INTRODUCTION, *_prefill(), *_decode(), *_backward(), *_other_calls(), *_memory(), *_models())


def _prefill() -> list[str]:
    avx2 = Result.load("isa_avx2")
    return [
        "## Prefill",
        "4096 tokens, hidden size 2048. GFLOP/s count half of the work for a causal mask. Figures of 128 and 512 "
        "tokens are in [a decision](../decisions/0056-pack-and-attend-short-heads-on-one-thread.md).",
        *_by_processor("prefill", "gflops"),
        "### With AVX2 only",
        "Our kernels are limited to AVX2; the peers use whatever the processor has, AVX-512 included.",
        *_comparison(avx2, "gflops", f"{avx2.processor} of which ours use AVX2"),
    ]


def _decode() -> list[str]:
    avx2 = Result.load("xeon_amx/isa_avx2_decode")
    return [
        "## Decode",
        "One query against a cache stored heads first, as Transformers stores it: (batch_size, nheads_k, seqlen, "
        'headdim). "Tokens first" is (batch_size, seqlen, nheads_k, headdim), as flash-attn stores it. "Heads folded" '
        'and "torch matmul" are written by hand in torch. A dash: the peer does not serve the call, or the variant '
        "does not apply to it.",
        *_by_processor("decode", "gbytes_per_s"),
        "### Decode with AVX2 only",
        "Our kernels are limited to AVX2; the peers use whatever the processor has. Eight query heads a key head take "
        "8 operations for every byte, so that arithmetic and memory allow the same: "
        f"{avx2.data['limits']['fma'] / 8:.0f} GB/s ([decision](../decisions/0059-read-sixteen-heads-together.md)).",
        *_comparison(avx2, "gbytes_per_s", f"{avx2.processor} of which ours use AVX2"),
    ]


def _by_processor(question: str, rate: str) -> list[str]:
    blocks = []
    for name in (question, f"xeon_amx/{question}"):
        result = Result.load(name)
        blocks += [f"### {result.processor}", *_comparison(result, rate, result.processor)]
    return blocks


def _other_calls() -> list[str]:
    tiny = Result.load("overhead")
    return [
        "## Sequences of uneven length",
        *_by_processor("packed", "gflops"),
        "## Overhead of a call",
        "A single token and a single head: next to no arithmetic, so this is what a call costs. We lose here.",
        *tiny.sourced(_table_of_calls(tiny.data, None)),
    ]


def _backward() -> list[str]:
    blocks = [
        "## Backward",
        "The gradients of q, k and v of 2048 tokens of hidden size 2048, and of one head of 8192 tokens. GFLOP/s count "
        "five products where a forward has two. SDPA accumulates gradients of bfloat16 in bfloat16, we in float32. "
        "Where an instruction set is named both sides are limited to it: ours by `FASTATTENTION_CPU_ISA`, torch by "
        "`ATEN_CPU_CAPABILITY`, `MKL_ENABLE_INSTRUCTIONS` and `ONEDNN_MAX_CPU_ISA`. On this Xeon the AVX-512 "
        "instruction for pairs of bfloat16 runs at half the rate of multiply-adds, and both sides are near that limit. "
        "In float32 with AVX2, 1.15x SDPA would be 80% of the peak.",
    ]
    for suffix, limited in (("", ""), ("_avx512_bf16", "AVX-512 with bfloat16"), ("_avx2", "AVX2")):
        result = Result.load(f"xeon_amx/backward{suffix}")
        where = f"{result.processor}, limited to {limited}" if limited else result.processor
        blocks += [f"### Backward: {where}", *_comparison(result, "gflops", where)]
    return blocks


def _memory() -> list[str]:
    result = Result.load("memory")
    return ["## Memory", *result.sourced(*peaks(result.data))]


def peaks(data: dict[str, Any]) -> list[str]:
    """Memory of prefill and backward."""
    return [
        "The most that a causal bfloat16 prefill of 4 heads of 64 takes beyond its inputs, the result included.",
        _peaks_of(data, "prefill"),
        "The same of its backward. The result is the gradients of q, k and v; what the forward kept is not counted: q, "
        "k, v, out and lse.",
        _peaks_of(data, "backward"),
    ]


def _peaks_of(data: dict[str, Any], kind: str) -> str:
    found = [peak for peak in data["peaks"] if peak["kind"] == kind]
    rows = []
    for seqlen, group in groupby(found, key=lambda peak: peak["seqlen"]):
        row = list(group)
        cells = [peak["reason"] or _megabytes(peak["extra_bytes"]) for peak in row]
        rows.append([tokens(seqlen), _megabytes(row[0]["result_bytes"]), *cells])
    return table(["tokens", "the result", *dict.fromkeys(peak["peer"] for peak in found)], rows)


def _models() -> list[str]:
    blocks = [
        "## A token of a whole model",
        "Transformers with a model of the shape of Llama 3.2 1B, random weights: the time of one token, and the ratio "
        'to SDPA. "Own threads" runs our thread pool instead of torch\'s OpenMP threads. "Noise" is SDPA against '
        "itself, in turns with the others. Attention is all attention calls of a token, with Python. Up to 512 keys "
        "ours takes 0.3 to 0.6 ms longer on sixteen threads: 20 to 40 us of Python a layer, at most 1% of a token.",
    ]
    for name in ("decode_in_model", "xeon_amx/decode_in_model"):
        result = Result.load(name)
        rows = tokens_of_models(result.data["rows"])
        blocks += [f"### {result.processor}", *result.sourced(rows, device=result.processor)]
    return blocks


def tokens_of_models(rows: list[dict[str, Any]], peer: str = "SDPA", part: str = "attention") -> str:
    """Times of a token; where it was measured, the noise and how much of a token is a part of the model."""
    headings = ["model dtype, keys", peer, "ours", f"vs {peer}", "ours, own threads", f"vs {peer}"]
    keys = ("sdpa", "fast_attention", "fast_attention, its own threads")
    every = []
    for row in rows:
        sdpa, ours, own = (row["seconds"][key] for key in keys)
        cells = [f"{row['dtype']}, {tokens(row['keys'])} keys", seconds(sdpa)]
        cells += [seconds(ours), ratio(sdpa / ours), seconds(own), ratio(sdpa / own)]
        if f"{part}_seconds" in row:
            shares = (row[f"{part}_seconds"][key] for key in keys[:2])
            cells += [f"{sdpa / row['seconds']['sdpa again']:.2f}x", *map(seconds, shares)]
        every.append(cells)
    heading = {"linear": "linear layers"}.get(part, part)
    return table([*headings, "noise", f"{heading} by {peer}", "by ours"][: len(every[0])], every)


def _comparison(result: Result, rate: str, device: str) -> list[str]:
    return result.sourced(f"{_table_of_calls(result.data, rate)}\n\n{_limits(result.data)}", device=device)


def _table_of_calls(data: dict[str, Any], rate: str | None) -> str:
    """A row for each call: our time and rate, the times of our other layouts, the ratio to each peer."""
    measurements = data["measurements"]
    peers = [name for name in data["peers"] if any(_measured(one, name) for one in measurements)]
    variants = [name for name in peers if name.startswith(f"{OURS},")]
    others = [name for name in peers if not name.startswith(OURS)]
    unit = {"gflops": "GFLOP/s", "gbytes_per_s": "GB/s"}.get(rate or "")
    rows = []
    for label, group in groupby(measurements, key=lambda one: one["workload"]["label"]):
        found = {one["peer"]: one for one in group if one["seconds"] is not None}
        ours = found[OURS]
        cells = [_call(label.partition(" ")[2] if unit else label), seconds(ours["seconds"]["median"])]
        if rate:
            cells += [number(ours[rate]), percent(ours["fraction_of_limit"])]
        cells += [_variant(found.get(name), bool(unit)) for name in variants]
        cells += [ratio(found[name]["fastattention_speedup"] if name in found else None) for name in others]
        rows.append(cells)
    headings = ["call", "ours", *([unit, "of limit"] if unit else []), *(HEADINGS[name] for name in variants + others)]
    return table(headings, rows)


def _call(label: str) -> str:
    """The label of a workload, as a reader would write it: 32 heads on 4 for 32:4 heads, 1 token for 1 tokens."""
    label = re.sub(r"(\d+):(\d+) heads", r"\1 heads on \2", label)
    return re.sub(r"\b1 (token|key|head)s\b", r"1 \1", label)


def _variant(one: dict[str, Any] | None, with_limit: bool) -> str:
    if one is None:
        return "-"
    share = f" ({percent(one['fraction_of_limit'])})" if with_limit else ""
    return seconds(one["seconds"]["median"]) + share


def _measured(one: dict[str, Any], name: str) -> bool:
    return one["peer"] == name and one["seconds"] is not None


def _limits(data: dict[str, Any]) -> str:
    limits, peers = data["limits"], data["peers"]
    found = {
        "GFLOP/s of float32": limits["fma"],
        "GFLOP/s of bfloat16 products": limits["bf16_dot"],
        "GB/s of memory reads": limits["dram_read"],
    }
    what = ", ".join(f"{value:.0f} {name}" for name, value in found.items() if value)
    measured = {one["peer"] for one in data["measurements"] if one["seconds"] is not None}
    versions = [f"{name} {version}" for name, version in peers.items() if name in measured & {"OpenVINO", "ggml"}]
    end = f" Peers: {'; '.join(versions)}." if versions else ""
    return f"Limits when the run began: {what}.{end}"


def _megabytes(count: int) -> str:
    return f"{number(count / 1e6)} MB"
