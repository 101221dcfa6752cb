"""The question "gpu": the speed of prefill on each code path of the GPU, and of torch's three kernels.

16384 tokens in all, hidden size 2048, float16: heads of 64 and 128, causal and not, equal and variable lengths. Useful
TFLOPS: 4 seqlen^2 headdim a head, half of that when causal. Medians of interleaved rounds, timed by the GPU.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.markup import escape
from rich.table import Table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from fastattention import fast_attn_func, fast_attn_varlen_func
from fastattention.attention.backend import AttentionBackend
from fastattention.attention.validation import Options, prepare_dense, prepare_varlen
from fastattention.backends.cuda.attention.backend import CudaBackend
from fastattention.cli.bench.record import write_record
from fastattention.cli.bench.timing import interleaved_on_device, time_on_device
from fastattention.cli.console import OUTPUT, first_line, progress_bar
from fastattention.cli.machine import describe_machine
from fastattention.errors import ArgumentError, UnsupportedError
from fastattention.gpu_runtime.chips import ARCHS, arch_of
from fastattention.quantized import quantize

FULL_SEQLENS, QUICK_SEQLENS = (1024, 2048, 4096, 8192, 16384), (1024, 4096)
TOKENS, HIDDEN = 16384, 2048
PEERS = {
    "SDPA flash": SDPBackend.FLASH_ATTENTION,
    "SDPA cudnn": SDPBackend.CUDNN_ATTENTION,
    "SDPA efficient": SDPBackend.EFFICIENT_ATTENTION,
}
# Lengths of variable-length sequences as parts of TOKENS.
UNEVEN = (0.25, 0.19, 0.15, 0.12, 0.1, 0.08, 0.06, 0.05)
PAGE_BLOCK_SIZE = 64
TimedCall = Callable[[], object]


def answer(seqlens: Sequence[int], rounds: int, output: Path) -> None:
    """Measure the current GPU, print a table, write gpu.json into `output`. Raises ArgumentError without one."""
    check_gpu("gpu")
    call_us, measurements = call_microseconds(), measure(paths_to_time(), seqlens, rounds)
    report = {"machine": describe_machine(), "call_us": call_us, "measurements": measurements}
    show(report)
    write_record(output / "gpu.json", report)


def check_gpu(question: str) -> None:
    """Raises ArgumentError where there is none."""
    if not torch.cuda.is_available():
        raise ArgumentError(f"question {question!r} needs a CUDA device, and torch sees none")


def newest_path() -> int:
    """The code path of the current GPU."""
    major, minor = torch.cuda.get_device_capability()
    return arch_of(10 * major + minor)


def paths_to_time() -> dict[str, CudaBackend]:
    """The code path of the current GPU, and Turing's on newer GPUs.

    Newer GPUs emulate Volta's m8n8k4, and Pascal's path has no matrix instructions, so these paths are not timed there.
    """
    newest = newest_path()
    timed = [arch for arch in ARCHS if arch == newest or (arch == 75 and newest == 80)]
    return {f"fastattention sm{arch}": CudaBackend(arch) for arch in timed}


def measure(backends: Mapping[str, AttentionBackend], seqlens: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """A record for every head dimension, mask and length, and one for variable-length sequences."""
    records = []
    problems = list(itertools.product((64, 128), (False, True)))
    with progress_bar() as bar:
        task = bar.add_task("prefill", total=len(problems))
        for headdim, causal in problems:
            for seqlen in seqlens:
                calls, flops = dense_calls(backends, headdim, causal, seqlen)
                records.append(record(f"{seqlen}", headdim, causal, flops, calls, rounds))
            calls, flops = varlen_calls(backends, headdim, causal)
            varlen = record("packed", headdim, causal, flops, calls, rounds)
            dense = dense_equivalent(backends, headdim, causal, rounds)
            paged = record("packed", headdim, causal, flops, paged_calls(headdim, causal), rounds)
            records.append({**varlen, "dense_tflops": dense, "paged_tflops": paged["tflops"]})
            bar.advance(task)
    return records


def tensors(*tokens: int, headdim: int, device: str = "cuda") -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v, (*tokens, heads, headdim)."""
    q, k, v = (torch.randn(*tokens, HIDDEN // headdim, headdim, dtype=torch.float16, device=device) for _ in range(3))
    return q, k, v


def dense_calls(
    backends: Mapping[str, AttentionBackend], headdim: int, causal: bool, seqlen: int
) -> tuple[dict[str, TimedCall], float]:
    """Every path and peer on sequences of one length, and the floating-point operations of a call."""
    q, k, v = tensors(TOKENS // seqlen, seqlen, headdim=headdim)
    problem, inputs = prepare_dense(q, k, v, Options(causal=causal, window_right=0 if causal else -1))
    calls: dict[str, TimedCall] = {
        name: partial(backend.forward, problem, inputs) for name, backend in backends.items()
    }
    q, k, v = heads_first(q), heads_first(k), heads_first(v)
    for name, peer in PEERS.items():
        calls[name] = partial(sdpa, peer, q, k, v, causal)
    return calls, 4.0 * (TOKENS // seqlen) * seqlen**2 * HIDDEN * (0.5 if causal else 1.0)


def heads_first(tensor: Tensor) -> Tensor:
    """(batch_size, seqlen, heads, headdim) -> contiguous (batch_size, heads, seqlen, headdim), for torch's kernels."""
    return tensor.transpose(1, 2).contiguous()


def sdpa(peer: SDPBackend, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Torch's attention by one of its kernels. Fewer key heads than query heads need torch 2.5."""
    grouped: dict[str, Any] = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
    with sdpa_kernel(peer):
        return scaled_dot_product_attention(q, k, v, is_causal=causal, **grouped)


def uneven() -> tuple[list[int], Tensor]:
    """Sequences of uneven length: the lengths, and their offsets as `cu_seqlens`."""
    lengths = [round(TOKENS * part) for part in UNEVEN]
    return lengths, torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cuda")


def varlen_calls(
    backends: Mapping[str, AttentionBackend], headdim: int, causal: bool
) -> tuple[dict[str, TimedCall], float]:
    """Every path on variable-length sequences of uneven length."""
    lengths, offsets = uneven()
    q, k, v = tensors(sum(lengths), headdim=headdim)
    options = Options(causal=causal, window_right=0 if causal else -1)
    problem, inputs = prepare_varlen(q, k, v, offsets, offsets, max(lengths), max(lengths), options)
    calls: dict[str, TimedCall] = {
        name: partial(backend.forward, problem, inputs) for name, backend in backends.items()
    }
    return calls, sum(4.0 * length**2 * HIDDEN for length in lengths) * (0.5 if causal else 1.0)


def paged_calls(headdim: int, causal: bool) -> dict[str, TimedCall]:
    """The sequences of `varlen_calls`, their keys and values in pages of every dtype that a cache may have."""
    lengths, offsets = uneven()
    longest = max(lengths)
    blocks_per_sequence = -(-longest // PAGE_BLOCK_SIZE)
    num_blocks = len(lengths) * blocks_per_sequence
    block_table = torch.randperm(num_blocks, device="cuda").int().view(len(lengths), -1)
    q = tensors(sum(lengths), headdim=headdim)[0]
    k, v = tensors(num_blocks, PAGE_BLOCK_SIZE, headdim=headdim)[1:]
    attend: Callable[..., Any] = fast_attn_varlen_func
    attend = partial(
        attend, cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=longest, max_seqlen_k=longest,
        block_table=block_table, causal=causal, backend="cuda",
    )  # fmt: skip
    calls: dict[str, TimedCall] = {"float16": partial(attend, q, k, v)}
    for name, dtype in {"int8": torch.int8, "float8": torch.float8_e4m3fn}.items():
        (stored_k, k_scale), (stored_v, v_scale) = quantize(k, dtype), quantize(v, dtype)
        calls[name] = partial(attend, q, stored_k, stored_v, k_scale=k_scale, v_scale=v_scale)
    return calls


def dense_equivalent(
    backends: Mapping[str, AttentionBackend], headdim: int, causal: bool, rounds: int
) -> dict[str, float]:
    """The rate of every path on dense batches of the same lengths, together: the baseline of varlen."""
    work, seconds = 0.0, dict.fromkeys(backends, 0.0)
    for part in UNEVEN:
        seqlen = round(TOKENS * part)
        calls, flops = dense_calls(backends, headdim, causal, seqlen)
        batch_size = TOKENS // seqlen
        times = interleaved_on_device({name: calls[name] for name in backends}, rounds)
        work += flops / batch_size
        for name in backends:
            seconds[name] += times[name] / batch_size
    return {name: work / taken / 1e12 for name, taken in seconds.items()}


def record(
    tokens: str,
    headdim: int,
    causal: bool,
    flops: float,
    calls: dict[str, TimedCall],
    rounds: int,
    device: str = "cuda",
) -> dict[str, Any]:
    """Times the calls in turns; a peer that does not serve this device or problem is left out, with its reason.

    failed: names of peers that raised something other than a refusal.
    """
    reasons: dict[str, str] = {}
    failed = []
    for name, call in calls.items():
        try:
            call()
        except Exception as error:  # a peer may be missing, or the compiler of its kernel may fail
            reasons[name] = first_line(error) or type(error).__name__
            if not isinstance(error, UnsupportedError):
                failed.append(name)
    served = {name: call for name, call in calls.items() if name not in reasons}
    seconds = interleaved_on_device(served, rounds, device=device)
    tflops = {name: flops / taken / 1e12 for name, taken in seconds.items()}
    shape = {"headdim": headdim, "causal": causal, "tokens": tokens}
    return {**shape, "tflops": tflops, "reasons": reasons, "failed": failed}


def call_microseconds() -> dict[str, float]:
    """Host time of a call on a single token: in all, and from validated call to enqueued kernel."""
    q, k, v = tensors(1, 1, headdim=64)
    problem, inputs = prepare_dense(q, k, v, Options())
    backend = CudaBackend()
    first = heads_first(q), heads_first(k), heads_first(v)
    return {
        "fast_attn_func": processor_microseconds(lambda: fast_attn_func(q, k, v)),
        "backend": processor_microseconds(lambda: backend.forward(problem, inputs)),
        "SDPA": processor_microseconds(lambda: scaled_dot_product_attention(first[0], first[1], first[2])),
    }


def processor_microseconds(call: TimedCall, count: int = 3000) -> float:
    """Median over rounds of the time until a call returns."""
    samples = []
    for _ in range(7):
        torch.cuda.synchronize()
        samples.append(1e6 * time_on_device(call, count, "cpu"))
    return statistics.median(samples)


def show(report: dict[str, Any]) -> None:
    """Print the table."""
    show_rates(report, "useful TFLOPS")
    for one in report["measurements"]:
        for name, dense in one.get("dense_tflops", {}).items():
            what = f"packed, headdim {one['headdim']}, {'causal' if one['causal'] else 'full'}, {name}"
            OUTPUT.print(f"{what}: {one['tflops'][name] / dense:.2f} of dense batches of the same lengths")
        if paged := one.get("paged_tflops"):
            rates = ", ".join(f"{name} {rate:.0f} TFLOPS" for name, rate in paged.items())
            OUTPUT.print(f"pages, headdim {one['headdim']}, {'causal' if one['causal'] else 'full'}: {rates}")
    calls = ", ".join(f"{name} {value:.1f} us" for name, value in report["call_us"].items())
    OUTPUT.print(f"processor time of a call: {calls}")


def show_rates(report: dict[str, Any], title: str) -> None:
    """Print the table of all rates, and why peers were left out."""
    machine = report["machine"]
    names = list(dict.fromkeys(name for one in report["measurements"] for name in one["tflops"]))
    title = f"{title}, {machine['gpus'][0]}, torch {machine['versions']['torch']}"
    table = Table("headdim", "causal", "tokens", *names, title=title)
    for one in report["measurements"]:
        rates = (f"{one['tflops'][name]:.0f}" if name in one["tflops"] else "" for name in names)
        table.add_row(str(one["headdim"]), "yes" if one["causal"] else "no", one["tokens"], *rates)
    OUTPUT.print(table)
    show_reasons(report)


def show_reasons(report: dict[str, Any]) -> None:
    """Print why peers were left out."""
    reasons = {name: reason for one in report["measurements"] for name, reason in one["reasons"].items()}
    for name, reason in reasons.items():
        OUTPUT.print(escape(f"{name}: {reason}"))
