"""README's chart: our speed relative to torch's SDPA, gains and losses."""

from __future__ import annotations

from typing import Any

from .chart import Bar, Chart, Group
from .results import Result

DTYPES = ("bfloat16", "float16", "float32")


def build() -> str:
    """speed.svg."""
    return Chart(
        "How much faster than PyTorch's attention?",
        "Speed relative to the same call of scaled_dot_product_attention (SDPA), logarithmic scale",
        (0.25, 0.5, 1, 2, 4, 8, 16),
        (_cpu(), _gpu_prefill(), _gpu_decode()),
        (
            "Prefill is causal with heads of 128. Decode is one query a sequence, heads of 128.",
            "The path for Turing was run on the H200. No V100, T4, P100 or Ascend NPU has been measured.",
            "All shapes, devices and losses: docs/benchmarks",
        ),
    ).svg()


def _cpu() -> Group:
    prefill, decode, overhead = Result.load("prefill"), Result.load("decode"), Result.load("overhead")
    bars = [
        Bar(
            "Prefill",
            f"{dtype}, 4K tokens",
            _speedup(prefill, f"prefill {dtype}, 4096 tokens, 16 heads of 128, causal"),
        )
        for dtype in DTYPES
    ]
    bars += [
        Bar("Decode", f"{dtype}, 16K keys", _speedup(decode, f"decode {dtype}, 16384 keys, 32 heads of 128"))
        for dtype in DTYPES
    ]
    bars.append(
        Bar("Overhead", "float32, a single token", _speedup(overhead, "prefill float32, 1 tokens, 1 heads of 64"))
    )
    return Group("CPU", f"{prefill.processor}", bars)


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
