"""The page of attention, projection and all-reduce among GPUs."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from .chart import Bar, Chart, Group
from .markdown import number, page, ratio, table, tokens
from .results import Result

INTRODUCTION = """\
A rank's share of an attention layer of the shape of LLaMA-2 7B or 70B: hidden size 4096 or 8192, 32 on 32 or 64 on 8
heads of 128, bfloat16, causal. GPUs share a host with NVLink. "Serial" is plain torch: attention, GEMM, one NCCL
all-reduce. cuDNN computes attention everywhere but in `default`, so only row blocks and the all-reduce differ. Figures
are medians of rounds in turns, the slowest rank's. Ratios are to serial, called in the same way; **bold** ratios are
losses. "Most possible" is serial over the longer of compute and all-reduce. Eager calls also pay for Python. Nothing
has been measured on an Ascend NPU or on V100s.

- `two-shot`: torch's attention, GEMM, and `two_shot_all_reduce_` in symmetric memory.
- `async`: torch's async tensor parallelism: attention, fused GEMM and reduce-scatter, all-gather.
- `default`: what a user gets: the backend that `auto` chooses, and the fastest strategy. Long prefill goes to cuDNN by
    itself ([0054](../decisions/0054-prefill-by-cudnn-on-hopper.md)).
- `auto`: the fastest strategy, with `backend="sdpa"`. The other columns are one transport each, with the same backend.
- `copy_engine` and `nccl_symmetric` no longer exist.

Results without `two-shot`, `async` and `default` were measured before these were compared."""
SECTIONS = (
    ("tiled_allreduce_tp2", "Two ranks"),
    ("tiled_allreduce_tp2_heads_of_4", "Two ranks with the heads of four"),
    ("tiled_allreduce_tp4", "Four ranks"),
    ("tiled_allreduce_tp2_no_p2p", "Two ranks without peer-to-peer access"),
    ("h100/tiled_allreduce_tp2_no_p2p", "Two ranks without peer-to-peer access"),
)
CHARTED = "tiled_allreduce_tp2"
NOTES = {
    "Two ranks with the heads of four": "Each of two ranks has the compute of one rank of four. It stands in for four "
    "ranks, which it is not: shares are halves, and there is one link to read from.",
    "Four ranks": "Measured before `peer_kernel` and `ring_product` existed, and not measured again since.",
    "Two ranks without peer-to-peer access": "NCCL goes through host memory, as between GPUs without NVLink. "
    "`two-shot` and `async` do not: they read the other GPU's memory here too.",
}
KINDS = {"graph": "CUDA graphs", "eager": "eager"}
COLUMNS = (
    "two-shot",
    "async",
    "default",
    "auto",
    "c10d",
    "ring_product",
    "peer_kernel",
    "copy_engine",
    "nccl_symmetric",
)


def build() -> str:
    """tensor-parallel.md."""
    blocks = [INTRODUCTION, "![`default` and `auto` against serial, by model and shape](../assets/tensor-parallel.svg)"]
    for name, title in SECTIONS:
        result = Result.load(name)
        where = f"{title}, {result.gpu}"
        blocks.append(f"## {where}")
        if title in NOTES:
            blocks.append(NOTES[title])
        blocks += result.sourced(*sections(where, result.data["rows"]))
    return page("Tensor parallelism", *blocks)


def sections(where: str, rows: list[dict[str, Any]]) -> list[str]:
    """Times, traces and plans of some ranks."""
    blocks = []
    kinds = [kind for kind in KINDS if any(kind in row["seconds"] for row in rows)]
    for kind in kinds:
        blocks += [f"### {where}: milliseconds, {KINDS[kind]}", _times(rows, kind)]
    if any("trace" in row for row in rows):
        blocks += [f"### {where}: traces of CUDA graphs", *_traces(rows)]
    return [*blocks, f"### {where}: what `auto` chose", _plans(rows, kinds[0])]


def build_chart() -> str:
    """tensor-parallel.svg: the speedup on two ranks, in CUDA graphs."""
    result = Result.load(CHARTED)
    groups = []
    for name, heading in (("default", "As users call it"), ("auto", 'With backend="sdpa", which has cuDNN attention')):
        bars = [Bar(_case(row), "", row["derived"]["graph"]["speedup"][name]) for row in result.data["rows"]]
        groups.append(Group(heading, "sequences x tokens", bars))
    return Chart(
        "What overlapping the all-reduce gains",
        f"Relative to attention by cuDNN, GEMM and NCCL all-reduce in turn; two {result.gpu}, CUDA graphs",
        (0.5, 0.7, 1, 1.4),
        groups,
        ("Layers of the shape of LLaMA-2 7B and 70B, bfloat16, causal. Eager calls are in the tables.",),
    ).svg()


def _times(rows: list[dict[str, Any]], kind: str) -> str:
    names = [name for name in COLUMNS if any(name in row["seconds"][kind] for row in rows)]
    cells = []
    for row in rows:
        taken = row["seconds"][kind]
        alone = [number(1e3 * taken[name]) for name in ("compute", "all-reduce", "serial")]
        bound = ratio(taken["serial"] / row["derived"][kind]["bound"])
        cells.append([_case(row), *alone, *(_against(taken, name) for name in names), bound])
    headings = ["model, sequences x tokens", "compute", "all-reduce", "serial"]
    return table([*headings, *(f"`{name}`" for name in names), "most possible"], cells)


def _against(taken: dict[str, float], name: str) -> str:
    return f"{number(1e3 * taken[name])} ({ratio(taken['serial'] / taken[name])})" if name in taken else "-"


def _case(row: dict[str, Any]) -> str:
    keys = "" if row["seqlen_q"] == row["seqlen_k"] else f" on {tokens(row['seqlen_k'])} keys"
    return f"{row['model']}, {row['batch_size']} x {tokens(row['seqlen_q'])}{keys}"


def _traces(cases: list[dict[str, Any]]) -> list[str]:
    rows = []
    for row in cases:
        found = row.get("trace", {}).get("graph", {}).get("auto")
        if found:
            times = [number(1e3 * found[name]) for name in ("compute", "communication", "exposed")]
            rows.append([_case(row), *times, f"{found['hidden']:.0%}", f"{found['inflation']:+.0%}"])
    what = "`auto`, rank 0, in milliseconds: how much of the communication runs under compute, and what that costs."
    headings = ["model, sequences x tokens", "compute", "communication", "exposed", "hidden", "compute longer by"]
    return [what, table(headings, rows)]


def _plans(cases: list[dict[str, Any]], kind: str) -> str:
    rows = []
    for row in cases:
        plan = row["plans"]["auto"][kind]
        hidden = row["derived"][kind]["hidden"]["auto"]
        rows.append([_case(row), f"`{plan['transport']}`", ", ".join(_runs(plan["rows"])), f"{hidden:.0%}"])
    headings = ["model, sequences x tokens", "transport", "rows of the blocks", "of the all-reduce hidden"]
    return table(headings, rows, text_columns=3)


def _runs(rows: list[int]) -> list[str]:
    """Runs of equal blocks, for example 4 x 2048."""
    runs = [(size, len(list(blocks))) for size, blocks in groupby(rows)]
    return [f"{count} x {size}" if count > 1 else str(size) for size, count in runs]
