"""A few times: ours and torch's, and on NPUs the vendor's operator and the simulator's predictions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.nn.functional import scaled_dot_product_attention

from fastattention import fast_attn_func
from fastattention.attention.backend import ATTENTION_BACKENDS
from fastattention.cli.bench import gpu, npu
from fastattention.cli.bench.gpu import HIDDEN, TOKENS, TimedCall, heads_first, tensors
from fastattention.cli.bench.timing import interleaved
from fastattention.cli.check.report import CheckReport, Entry, Note

# (headdim, causal, seqlen): 16384 tokens in all in float16, or on a CPU one sequence in float32.
SHAPES = ((64, True, 1024), (128, True, 4096), (128, False, 4096))
CPU_SHAPES = ((64, True, 512), (128, True, 1024), (128, False, 1024))
ROUNDS = 3
CPU_SECONDS = 0.5


def run(report: CheckReport, device: str, on_shape: Callable[[], None] = lambda: None) -> None:
    """Adds an entry for each shape. on_shape: called when one is done."""
    for headdim, causal, seqlen in SHAPES if device != "cpu" else CPU_SHAPES:
        known = {"kind": "speed", "name": f"prefill of {seqlen}", "headdim": headdim, "causal": causal}
        report.attempt(known, partial(_measure, device, headdim, causal, seqlen))
        on_shape()


def _measure(device: str, headdim: int, causal: bool, seqlen: int, note: Note) -> Entry:
    ours: tuple[str, ...]
    if device == "npu":
        name = torch.npu.get_device_name()  # type: ignore[attr-defined]
        shape = (headdim, causal, TOKENS // seqlen, seqlen, HIDDEN // headdim)
        measured = npu.measure_shape(name, shape, ROUNDS)
        ours = (npu.OURS, npu.THROUGH_US)
        found = {one: measured[one] for one in ("tflops", "reasons", "predicted_tflops")}
    elif device == "cuda":
        calls, flops = gpu.dense_calls({"fastattention": ATTENTION_BACKENDS.get("cuda")}, headdim, causal, seqlen)
        measured, ours = gpu.record(f"{seqlen}", headdim, causal, flops, calls, ROUNDS), ("fastattention",)
        found = {one: measured[one] for one in ("tflops", "reasons")}
    else:
        return {"state": "measured", "tflops": _on_cpu(headdim, causal, seqlen)}
    for name in ours:
        if name in measured["failed"]:
            return {**found, "state": "failed", "reason": f"{name}: {measured['reasons'][name]}"}
    return {**found, "state": "measured"}


def _on_cpu(headdim: int, causal: bool, seqlen: int) -> dict[str, float]:
    q, k, v = (tensor.float() for tensor in tensors(1, seqlen, headdim=headdim, device="cpu"))
    calls: dict[str, TimedCall] = {
        "fastattention": partial(fast_attn_func, q, k, v, causal=causal, backend="cpu"),
        "SDPA": partial(scaled_dot_product_attention, heads_first(q), heads_first(k), heads_first(v), is_causal=causal),
    }
    for call in calls.values():
        call()
    flops = 4.0 * seqlen**2 * HIDDEN * (0.5 if causal else 1.0)
    return {name: flops / timing.median / 1e12 for name, timing in interleaved(calls, CPU_SECONDS).items()}
