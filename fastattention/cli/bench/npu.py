"""The question "npu": the speed of prefill on an Ascend NPU, by our kernels and by torch_npu.

16384 tokens in all, hidden size 2048, float16, heads of 64 and 128, causal and not; and one head of 128, whose
latencies have been published for a 910B2. Times of our kernel are shown with the simulator's predictions. Medians of
interleaved rounds, timed by the NPU. It has not been run on an NPU.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fastattention.attention.problem import Inputs, Problem
from fastattention.attention.validation import Options, prepare_dense
from fastattention.backends.ascend.backend import AscendBackend
from fastattention.backends.ascend.chips import find_chip
from fastattention.backends.ascend.mask_tile import mask_tile
from fastattention.backends.ascend.simulator.whole_chip import predict
from fastattention.backends.ascend.simulator.workload import SimulatedCall
from fastattention.backends.ascend.tiling import choose_tiling
from fastattention.cli.bench.gpu import HIDDEN, TOKENS, TimedCall, heads_first, record, show_reasons, tensors
from fastattention.cli.bench.record import write_record
from fastattention.cli.console import OUTPUT, progress_bar
from fastattention.cli.machine import describe_machine
from fastattention.errors import ArgumentError

DEVICE = "npu"
ONE_HEAD_SEQLENS = (1024, 2048, 4096, 8192, 16384, 32768)
OURS, THROUGH_US = "our Triton kernel", "torch_npu through us"


def answer(seqlens: Sequence[int], rounds: int, output: Path) -> None:
    """Measure the current NPU, print a table, write npu.json into `output`. Raises ArgumentError without one."""
    reason = AscendBackend().why_unavailable()
    if reason is not None:
        raise ArgumentError(f"question 'npu' needs an Ascend NPU: {reason}")
    name = torch.npu.get_device_name()  # type: ignore[attr-defined]
    torch_npu = importlib.import_module("torch_npu")
    machine = {**describe_machine(), "npu": name, "torch_npu": torch_npu.__version__}
    report = {"machine": machine, "measurements": measure(name, seqlens, rounds)}
    show(report)
    write_record(output / "npu.json", report)


def measure(
    name: str, seqlens: Sequence[int], rounds: int, one_head: Sequence[int] = ONE_HEAD_SEQLENS
) -> list[dict[str, Any]]:
    """A record for every head dimension, mask and length, and for one head at the published lengths.

    name: the NPU, for which predictions are made if it is known.
    """
    shapes = [
        (headdim, causal, TOKENS // seqlen, seqlen, HIDDEN // headdim)
        for headdim, causal, seqlen in itertools.product((64, 128), (False, True), seqlens)
    ]
    shapes += [(128, False, 1, seqlen, 1) for seqlen in one_head]
    with progress_bar() as bar:
        return [measure_shape(name, shape, rounds) for shape in bar.track(shapes, description="prefill")]


def measure_shape(name: str, shape: tuple[int, bool, int, int, int], rounds: int) -> dict[str, Any]:
    """The record of one shape: (headdim, causal, batch_size, seqlen, nheads). name: as in `measure`."""
    headdim, causal, batch_size, seqlen, nheads = shape
    every_head = tensors(batch_size, seqlen, headdim=headdim, device=DEVICE)
    q, k, v = (tensor[:, :, :nheads].contiguous() for tensor in every_head)
    problem, inputs = prepare_dense(q, k, v, Options(causal=causal, window_right=0 if causal else -1))
    flops = 4.0 * batch_size * seqlen**2 * nheads * headdim * (0.5 if causal else 1.0)
    what = f"{batch_size} x {seqlen}, {nheads} heads"
    one = record(what, headdim, causal, flops, calls_of(problem, inputs), rounds, DEVICE)
    return {**one, "predicted_tflops": predicted_tflops(problem, flops, name)}


def predicted_tflops(problem: Problem, flops: float, name: str) -> dict[str, float]:
    """The simulator's prediction for our kernel; empty for an NPU that it does not know."""
    try:
        chip = find_chip(name)
    except ArgumentError:
        return {}
    return {OURS: flops / predict(SimulatedCall.of(problem), choose_tiling(problem, chip), chip).seconds / 1e12}


def calls_of(problem: Problem, inputs: Inputs) -> dict[str, TimedCall]:
    """Both of our implementations, and the operator that torch_npu's users call, with heads before tokens."""
    q, k, v = heads_first(inputs.q), heads_first(inputs.k), heads_first(inputs.v)
    return {
        OURS: partial(AscendBackend("triton").forward, problem, inputs),
        THROUGH_US: partial(AscendBackend("vendor").forward, problem, inputs),
        "npu_fusion_attention": partial(_npu_fusion_attention, problem, q, k, v),
        "SDPA": partial(scaled_dot_product_attention, q, k, v, is_causal=problem.is_causal),
    }


def _npu_fusion_attention(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> object:
    """The operator itself. Its sparse_mode 3 is the bottom-right causal mask, by a compressed mask."""
    torch_npu = importlib.import_module("torch_npu")
    mask = {"atten_mask": mask_tile(q.device), "sparse_mode": 3} if problem.is_causal else {}
    return torch_npu.npu_fusion_attention(q, k, v, problem.nheads, "BNSD", scale=problem.softmax_scale, **mask)


def show(report: dict[str, Any]) -> None:
    """Print the table."""
    names = list(dict.fromkeys(name for one in report["measurements"] for name in one["tflops"]))
    title = f"useful TFLOPS, {report['machine']['npu']}"
    table = Table("headdim", "causal", "call", *names, f"{OURS}, predicted", title=title)
    for one in report["measurements"]:
        rates = (f"{one['tflops'][name]:.0f}" if name in one["tflops"] else "" for name in names)
        predicted = "".join(f"{rate:.0f}" for rate in one["predicted_tflops"].values())
        table.add_row(str(one["headdim"]), "yes" if one["causal"] else "no", one["tokens"], *rates, predicted)
    OUTPUT.print(table)
    show_reasons(report)
