"""README's chart: our speed relative to torch's SDPA, gains and losses."""

from __future__ import annotations

from statistics import median
from typing import Any

from .chart import Bar, Chart, Group
from .results import Result
from .whole_models import OURS

DTYPES = ("bfloat16", "float32")
AVX2_PREFILL, AVX2_DECODE = "isa_avx2", "xeon_amx/isa_avx2_decode"


def build() -> str:
    """speed.svg."""
    return Chart(
        "How much faster than PyTorch's attention?",
        "Speed relative to the same call of scaled_dot_product_attention (SDPA), logarithmic scale",
        (0.25, 0.5, 1, 2, 4, 8, 16),
        (
            _cpu("CPU, AVX-512", "prefill", "decode"),
            _cpu("CPU, AMX", "xeon_amx/prefill", "xeon_amx/decode", "overhead"),
            _cpu("CPU, AVX2 alone", AVX2_PREFILL, AVX2_DECODE),
            _gpu_prefill(),
            _gpu_decode(),
            _whole_models(),
        ),
        (
            "Prefill is causal with heads of 128. Decode is one query a sequence, heads of 128.",
            "The path for Turing was run on the H200. No V100, T4, P100 or Ascend NPU has been measured.",
            "All shapes, devices and losses: docs/benchmarks",
        ),
    ).svg()


def _cpu(heading: str, prefill: str, decode: str, overhead: str | None = None) -> Group:
    """Arguments name results; the prefill on AVX2 has no bfloat16."""
    of_prefill, of_decode = Result.load(prefill), Result.load(decode)
    bars = [
        Bar(
            "Prefill",
            f"{dtype}, 4K tokens",
            _speedup(of_prefill, f"prefill {dtype}, 4096 tokens, 16 heads of 128, causal"),
        )
        for dtype in (DTYPES if prefill != AVX2_PREFILL else DTYPES[1:])
    ]
    bars += [
        Bar("Decode", f"{dtype}, 16K keys", _speedup(of_decode, f"decode {dtype}, 16384 keys, 32 heads of 128"))
        for dtype in DTYPES
    ]
    if overhead is not None:
        label = "prefill float32, 1 tokens, 1 heads of 64"
        bars.append(Bar("Overhead", "float32, a single token", _speedup(Result.load(overhead), label)))
    both = "both of these, without newer instructions"
    return Group(heading, both if prefill == AVX2_PREFILL else of_prefill.processor, bars)


def _whole_models() -> Group:
    """Models of Transformers, whose other layers take time too, against their attention by SDPA."""
    on_gpu = Result.load("h100/model_llama-3-8b")
    figures = next(row["figures"] for row in on_gpu.data["rows"] if (row["batch_size"], row["seqlen"]) == (1, 8192))
    bars = [
        Bar(label, f"{on_gpu.gpu}, LLaMA-3-8B, 8K tokens", median(figures["sdpa"][key]) / median(figures[OURS][key]))
        for label, key in (("Prefill", "prefill"), ("Decode", "graphed_decode"))
    ]
    for name in ("decode_in_model", "xeon_amx/decode_in_model"):
        result = Result.load(name)
        row = next(row for row in result.data["rows"] if (row["dtype"], row["keys"]) == ("bfloat16", 16384))
        taken = row["seconds"]
        bars.append(Bar("Decode", f"{result.processor}, 16K keys", taken["sdpa"] / taken[OURS]))
    return Group("Whole models", "Transformers, bfloat16", bars)


def _speedup(result: Result, label: str) -> float:
    found = (
        one["fastattention_speedup"]
        for one in result.data["measurements"]
        if one["workload"]["label"] == label and one["peer"] == "torch SDPA"
    )
    return float(next(found))


def _gpu_prefill() -> Group:
    result = Result.load("gpu")
    rates = _only(result, headdim=128, causal=True, tokens="4096")["tflops"]
    ours, turing = rates["fastattention sm80"], rates["fastattention sm75"]
    bars = [
        Bar("Path for Turing", "vs CUTLASS, what a T4 has", turing / rates["SDPA efficient"]),
        Bar("Path for Ampere", "vs FlashAttention-2", ours / rates["SDPA flash"]),
        Bar("Path for Ampere", "vs cuDNN's Hopper kernel", ours / rates["SDPA cudnn"]),
    ]
    return Group("GPU, prefill", f"{result.gpu}, float16, 4K tokens, against SDPA's three kernels", bars)


def _gpu_decode() -> Group:
    result = Result.load("gpu_decode")
    taken = _only(result, batch_size=16, nheads=32, nheads_k=8, seqlen=8192)["microseconds"]
    bars = [
        Bar("Path for Ampere", "vs FlashAttention-2", taken["SDPA flash"] / taken["fastattention"]),
        Bar("Path for Ampere", "vs cuDNN", taken["SDPA cudnn"] / taken["fastattention"]),
    ]
    return Group("GPU, decode", f"{result.gpu}, float16, 16 sequences over 8K keys", bars)


def _only(result: Result, **fields: object) -> dict[str, Any]:
    found = (one for one in result.data["measurements"] if all(one[name] == value for name, value in fields.items()))
    return dict(next(found))
