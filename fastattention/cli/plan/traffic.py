"""`fastattention plan traffic`: predicts the main-memory traffic of a call on a GPU. Needs no GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from rich import box
from rich.table import Table

from fastattention.attention.problem import MAX_HEADDIM_V, Layout, Problem
from fastattention.backends.common.traffic import Extent, traffic_of
from fastattention.backends.cuda.attention.config import KernelConfig
from fastattention.backends.cuda.attention.launches import choose_launches
from fastattention.backends.cuda.attention.traffic import tiled_keys
from fastattention.backends.cuda.attention.waves import resident_ctas
from fastattention.cli.console import OUTPUT
from fastattention.engine.explain import Bytes, Traffic
from fastattention.errors import ArgumentError
from fastattention.gpu_runtime.chips import CHIPS, Limits
from fastattention.sizes import format_bytes

NOTE = (
    "Every number is predicted. An H200 moved as much within 15% in six calls of eight, and up to four times as much "
    "for a long head without a mask. docs/internals/traffic.md has the model."
)


@dataclass(frozen=True)
class TrafficOptions:
    """The options of the command."""

    batch_size: int
    seqlen_q: int | None  # queries of a call with a cache; None for a call without one, with as many queries as keys
    seqlen_k: int
    nheads: int
    nheads_k: int
    headdim: int
    causal: bool
    dtype: str
    gpu: str

    @property
    def limits(self) -> Limits:
        """The limits of the GPU. Raises ArgumentError for an unknown one."""
        if self.gpu not in CHIPS:
            raise ArgumentError(f"gpu={self.gpu!r} is not known; choose from {', '.join(CHIPS)}")
        return CHIPS[self.gpu]

    @property
    def problem(self) -> Problem:
        """The call. Raises ArgumentError, naming the option, for a wrong one."""
        if not 1 <= self.headdim <= MAX_HEADDIM_V:
            raise ArgumentError(f"headdim={self.headdim} is not served; use 1 to {MAX_HEADDIM_V}")
        if self.nheads % self.nheads_k:
            raise ArgumentError(f"heads_k={self.nheads_k} does not divide heads={self.nheads}")
        seqlen_q = self.seqlen_q or self.seqlen_k
        return Problem(
            layout=Layout.DENSE if self.seqlen_q is None else Layout.KVCACHE,
            device=torch.device("cuda"),
            dtype=getattr(torch, self.dtype),
            batch_size=self.batch_size,
            seqlen_q=seqlen_q,
            seqlen_k=self.seqlen_k,
            total_q=self.batch_size * seqlen_q,
            nheads=self.nheads,
            nheads_k=self.nheads_k,
            headdim=self.headdim,
            headdim_v=self.headdim,
            softmax_scale=self.headdim**-0.5,
            window_left=-1,
            window_right=0 if self.causal else -1,
        )


def plan(options: TrafficOptions) -> None:
    """Print how the call is tiled, and its traffic. Raises ArgumentError for a wrong option."""
    limits, problem = options.limits, options.problem
    extent = Extent({(problem.seqlen_q, problem.seqlen_k): problem.batch_size})
    kernels = choose_launches(problem, limits.arch, limits)
    keys = tiled_keys(problem, extent, kernels, limits)
    config = kernels.attention[0].variant
    assert isinstance(config, KernelConfig)
    OUTPUT.print(_summary(options, problem, config, keys))
    OUTPUT.print(_bytes(traffic_of(problem, extent, "cuda", keys, limits.on_chip_bytes), limits))
    OUTPUT.print(NOTE)


def _summary(options: TrafficOptions, problem: Problem, config: KernelConfig, keys: int) -> Table:
    table = Table(title="Plan", title_justify="left", title_style="bold", box=box.SIMPLE, show_header=False)
    limits, mask = options.limits, ", causal" if options.causal else ""
    shape = f"{problem.batch_size} x {problem.seqlen_q} queries, {problem.seqlen_k} keys"
    rows = {
        "call": f"{shape}, {options.dtype}{mask}",
        "heads": f"{problem.nheads} of queries, {problem.nheads_k} of keys, head dimension {problem.headdim}",
        "gpu": f"{options.gpu}: {limits.num_sms} SMs, L2 cache {format_bytes(limits.l2_bytes)}",
        "kernel": f"{'decode' if config.decodes else 'forward'}, {config.tile_m} rows a CTA, "
        f"{resident_ctas(config, limits)} CTAs at a time",
        "keys and values": f"read {keys / (problem.batch_size * problem.seqlen_k):.2f} times",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _bytes(traffic: Traffic, limits: Limits) -> Table:
    table = Table(title="Main-memory traffic", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("")
    for heading in ("read", "written", "in all", "of the bound"):
        table.add_column(heading, justify="right", no_wrap=True)

    def add(name: str, moved: Bytes) -> None:
        sizes = (format_bytes(size) for size in (*moved, moved.total))
        table.add_row(name, *sizes, f"{moved.total / traffic.lower_bound:.2f}x")

    assert traffic.tiled is not None
    assert traffic.io_bound is not None
    add("as tiled", traffic.tiled)
    add("standard attention", traffic.standard)
    add("inputs and results once", traffic.compulsory)
    table.add_row("N^2 d^2 / M", "", "", format_bytes(traffic.io_bound), "")
    table.caption_justify = "left"
    table.caption = (
        "The bound is the larger of the last two. "
        f"M = {format_bytes(limits.on_chip_bytes)}, all memory on the chip; constant factor 1."
    )
    return table
