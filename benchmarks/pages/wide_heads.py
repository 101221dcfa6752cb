"""The page of head dimensions above 256 and of latent attention."""

from __future__ import annotations

from typing import Any

from .markdown import number, page, percent, ratio, seconds, table, tokens
from .results import Result

INTRODUCTION = """\
Head dimensions of 512, as Gemma 4 has them, and multi-head latent attention as DeepSeek decodes it: keys of 576 whose
first 512 columns are the values, all query heads on one key head. Nothing has been measured on a V100, T4 or P100."""
PREFILL = """\
16384 tokens in all, 4 heads of 512, bfloat16. Figures are useful TFLOPS (a causal mask counts half). Torch's
FlashAttention and cuDNN kernels refuse heads above 256; "CUTLASS" is its kernel "efficient", "math" its fallback."""
GRADIENTS = """\
The backward alone of the same calls; useful TFLOPS count 2.5 times the operations of the forward. "Deterministic" gives
the same bits in every run. A tile has 32 keys and 32 queries, and its shared memory leaves a multiprocessor one CTA of
eight warps. "Math" keeps all weights, whose memory grows with the square of the length."""
DECODE = """\
One query a sequence, bfloat16, calls replayed from a CUDA graph. GB/s count keys and values, which lie in the same
memory in latent attention. FlashMLA publishes up to 3000 GB/s and 660 TFLOPS for latent decode on an H800. Its kernels
use Hopper's own matrix instructions, and ours do not: with 128 heads that is 2.5 times as fast as we are. With one
sequence of 16 heads, merging the results of 132 CTAs took 6 of 66 microseconds on an H100."""
CPU = """\
As many elements at both head dimensions: 8 heads of 256 or 4 of 512. "Of limit" compares with a loop of multiply-adds
in the call's dtype or of memory reads, on the same processor in the same run; the limit is the one that is nearer."""
LATENT_ON_CPU = """\
Latent decode of 16 heads in float32 or float16 is limited by neither alone: a key's products take as long as
reading it. With 128 heads in bfloat16 both products together reach 1.1 TFLOPS, nearly what prefill does, and a
sixth of a bare loop of AMX products. Loads and stores of tiles take the rest: of samples of the time, a third were
at tiles of results, which every block of 64 keys loads and stores. Blocks of 128 keys took 0.87 of the time on a
dense cache. With pages of 64 they took as long as before, and 1.15 of it for 16 heads: across pages keys must be
copied."""


def build() -> str:
    """wide-heads.md."""
    gpu, cpu = Result.load("gpu_headdim"), Result.load("headdim")
    return page(
        "Wide heads and latent attention",
        INTRODUCTION,
        *gpu.sourced(
            f"## Prefill, {gpu.gpu}",
            PREFILL,
            prefill(gpu.data),
            f"## Gradients, {gpu.gpu}",
            GRADIENTS,
            gradients(gpu.data),
            f"## Decode, {gpu.gpu}",
            DECODE,
            decode(gpu.data),
        ),
        f"## {cpu.processor}",
        CPU,
        LATENT_ON_CPU,
        *cpu.sourced(on_cpu(cpu.data)),
    )


def prefill(data: dict[str, Any]) -> str:
    """On a GPU, beside torch's kernels."""
    rows = []
    for one in (row for row in data["rows"] if row["kind"] == "prefill"):
        rates = {name: one["flops"] / taken / 1e6 for name, taken in one["microseconds"].items()}
        ours, cutlass, math = (rates[name] for name in ("fastattention", "SDPA efficient", "SDPA math"))
        label = f"{tokens(one['seqlen'])}, {'causal' if one['causal'] else 'full'}"
        rows.append([label, *(f"{rate:.0f}" for rate in (ours, cutlass, math)), ratio(ours / cutlass)])
    return table(["tokens, mask", "`sm80`", "CUTLASS", "math", "vs CUTLASS"], rows)


def gradients(data: dict[str, Any]) -> str:
    """On a GPU, beside torch's kernels."""
    names = ("fastattention", "fastattention deterministic", "SDPA efficient", "SDPA math")
    rows = []
    for one in (row for row in data["rows"] if row["kind"] == "gradients"):
        ours, in_order, cutlass, math = (one["flops"] / one["microseconds"][name] / 1e6 for name in names)
        label = f"{tokens(one['seqlen'])}, {'causal' if one['causal'] else 'full'}"
        cells = (f"{rate:.0f}" for rate in (ours, in_order, cutlass, math))
        rows.append([label, *cells, ratio(ours / cutlass), ratio(in_order / cutlass)])
    headings = ["tokens, mask", "`sm80`", "deterministic", "CUTLASS", "math", "vs CUTLASS", "deterministic vs CUTLASS"]
    return table(headings, rows)


def decode(data: dict[str, Any]) -> str:
    """On a GPU, beside a copy."""
    copy = data["copy_gbps"]
    rows = []
    for one in (row for row in data["rows"] if "decode" in row["kind"]):
        for place, taken in one["microseconds"].items():
            gbps = one["bytes"] / taken / 1e3
            heads = "16 on 2 heads of 512" if one["kind"] == "decode" else f"latent, {one['nheads']} heads"
            label = f"{heads}, {one['batch_size']} x {tokens(one['keys'])}, {place}"
            cells = [number(taken), f"{gbps:.0f}", percent(gbps / copy), f"{one['flops'] / taken / 1e6:.0f}"]
            rows.append([label, *cells])
    return table(["call, sequences x keys, cache", "us", "GB/s", "of a copy", "TFLOPS"], rows)


def on_cpu(data: dict[str, Any]) -> str:
    """Beside the limits of the processor."""
    rows = []
    for one in data["rows"]:
        arithmetic, reads = one["limits"].values()
        works: dict[str, Any] = one["works"]
        rates = {name: work["flops"] / work["seconds"] for name, work in works.items()}
        first = next(iter(rates.values()))
        for name, work in works.items():
            limit = max(rates[name] / arithmetic, work["bytes"] / work["seconds"] / reads)
            against = "-" if name == next(iter(works)) else f"{rates[name] / first:.2f}x"
            rows.append([f"{one['dtype']}, {one['call']}, {name}", seconds(work["seconds"]), percent(limit), against])
    return table(["dtype, call, head dimension or cache", "time", "of limit", "rate, against the row above"], rows)
