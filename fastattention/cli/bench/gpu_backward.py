"""The question "gpu_backward": the speed of the backward on each code path of the GPU, and of torch's three kernels.

16384 tokens in all, hidden size 2048, float16: heads of 64, 128 and 256, causal and not, of one length. Useful TFLOPS:
2.5 times the floating-point operations of the forward, whatever a kernel computes again. Medians of interleaved rounds,
timed by the GPU. Also the peak memory of a forward and its backward, up to 64K tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor
from torch.nn.attention import SDPBackend

from fastattention import fast_attn_func
from fastattention.attention.problem import OutputGradients
from fastattention.attention.validation import Options, prepare_dense
from fastattention.backends.cuda.attention.backend import CudaBackend
from fastattention.cli.bench.gpu import (
    HIDDEN,
    PEERS,
    TOKENS,
    TimedCall,
    check_gpu,
    heads_first,
    paths_to_time,
    record,
    sdpa,
    show_rates,
    tensors,
)
from fastattention.cli.bench.record import write_record
from fastattention.cli.console import OUTPUT, progress_bar
from fastattention.cli.machine import describe_machine

PEAK_SEQLENS = (16384, 32768, 65536)


def answer(seqlens: Sequence[int], rounds: int, output: Path) -> None:
    """Measure the current GPU, print a table, write gpu_backward.json. Raises ArgumentError without a GPU."""
    check_gpu("gpu_backward")
    found = peaks(PEAK_SEQLENS)
    measurements = measure(paths_to_time(), seqlens, rounds)
    report = {"machine": describe_machine(), "measurements": measurements, "peaks": found}
    show_rates(report, "useful TFLOPS of a backward")
    show_peaks(found)
    write_record(output / "gpu_backward.json", report)


def measure(backends: Mapping[str, CudaBackend], seqlens: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """A record for every head dimension, mask and length."""
    records = []
    problems = list(itertools.product((64, 128, 256), (False, True), seqlens))
    with progress_bar() as bar:
        for headdim, causal, seqlen in bar.track(problems, description="backward"):
            calls = calls_of(backends, headdim, causal, seqlen)
            flops = 2.5 * 4.0 * (TOKENS // seqlen) * seqlen**2 * HIDDEN * (0.5 if causal else 1.0)
            records.append(record(f"{seqlen}", headdim, causal, flops, calls, rounds))
    return records


def calls_of(
    backends: Mapping[str, CudaBackend], headdim: int, causal: bool, seqlen: int, device: str = "cuda"
) -> dict[str, TimedCall]:
    """The backward of every path and peer. Its forward runs before and is not part of the call."""
    q, k, v = tensors(TOKENS // seqlen, seqlen, headdim=headdim, device=device)
    grad = torch.randn_like(q)
    problem, inputs = prepare_dense(q, k, v, Options(causal=causal, window_right=0 if causal else -1))
    problem = replace(problem, grads=("q", "k", "v"))
    calls: dict[str, TimedCall] = {}
    for name, backend in backends.items():
        result, given = backend.forward(problem, inputs), OutputGradients(grad, None)
        calls[name] = partial(backend.backward, problem, inputs, result, given)
        in_order = replace(problem, deterministic=True)
        calls[f"{name} deterministic"] = partial(backend.backward, in_order, inputs, result, given)
    leaves = [heads_first(tensor).requires_grad_() for tensor in (q, k, v)]
    for name, peer in PEERS.items():
        calls[name] = Backward(peer, leaves, heads_first(grad), causal)
    return calls


class Backward:
    """Torch's backward by one of its kernels. The forward runs in the first call, which raises where it is refused."""

    def __init__(self, peer: SDPBackend, leaves: Sequence[Tensor], grad: Tensor, causal: bool) -> None:
        self._peer, self._leaves, self._grad, self._causal = peer, leaves, grad, causal
        self._out: Tensor | None = None

    def __call__(self) -> tuple[Tensor, ...]:
        """Gradients of q, k and v."""
        if self._out is None:
            q, k, v = self._leaves
            self._out = sdpa(self._peer, q, k, v, self._causal)
        return torch.autograd.grad(self._out, self._leaves, self._grad, retain_graph=True)


def peaks(seqlens: Sequence[int]) -> list[dict[str, Any]]:
    """Peak bytes of a causal forward and backward beyond q, k, v and out's gradient: one sequence, heads of 128."""
    return [{"tokens": seqlen, "bytes": _peaks_of(seqlen)} for seqlen in seqlens]


def _peaks_of(seqlen: int) -> dict[str, int]:
    q, k, v = (tensor.requires_grad_() for tensor in tensors(1, seqlen, headdim=128))
    first = [heads_first(tensor.detach()).requires_grad_() for tensor in (q, k, v)]
    forwards: dict[str, tuple[Callable[..., Tensor], Sequence[Tensor]]] = {}
    for deterministic in (False, True):
        attend: Callable[..., Any] = fast_attn_func
        name = "fastattention deterministic" if deterministic else "fastattention"
        forwards[name] = partial(attend, causal=True, deterministic=deterministic, backend="cuda"), (q, k, v)
    for name, peer in PEERS.items():
        forwards[name] = partial(sdpa, peer, causal=True), first
    found = {}
    for name, (forward, leaves) in forwards.items():
        grad = torch.randn_like(leaves[0])
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        try:
            torch.autograd.grad(forward(*leaves), leaves, grad)
        except RuntimeError:  # the peer does not serve this device: `measure` says why
            continue
        found[name] = torch.cuda.max_memory_allocated() - before
    return found


def show_peaks(peaks: list[dict[str, Any]]) -> None:
    """Print the table of peak memory."""
    names = list(dict.fromkeys(name for one in peaks for name in one["bytes"]))
    table = Table("tokens", *names, title="peak memory of a forward and backward beyond its inputs, MB")
    for one in peaks:
        found = one["bytes"]
        table.add_row(str(one["tokens"]), *(f"{found[name] / 1e6:.0f}" if name in found else "" for name in names))
    OUTPUT.print(table)
