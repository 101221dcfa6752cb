"""The page of attention on 1 to many threads of a CPU."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from .markdown import page, percent, ratio, seconds, table
from .results import Result

INTRODUCTION = """\
Calls of 16 heads of 128 on 1 to 16 threads, beside torch's SDPA, in turns in one process. A decode has 32 query heads
on 8, one sequence of 32K keys or 16 sequences of 4K; SDPA gets its caches heads first, as it needs them. "Tokens first"
is flash-attn's layout of a cache. "Scaling" is the speed on the most threads as a multiple of that on one, and its
share of what a plain matrix product (decode: a plain sum) reaches. **Bold** ratios are losses. Linear attention is the
gated delta rule, which torch lacks."""
BUSY = """\
The same calls on all threads while another process keeps one core busy, as multiples of the time without it. Medians
above 2 are those of torch's OpenMP threads, which did our work and end each loop together. Since this was measured such
a team is left alone ([0078](../decisions/0078-keep-many-threads-of-a-cpu-busy.md))."""
LIMITS = """\
- **Prompts in bfloat16 on 16 threads.** The host slows tile instructions by up to four times, for seconds at a time
  ([0077](../decisions/0077-keep-scores-of-amx-in-the-l1-cache.md)).
- **Tokens first.** 0.50 to 0.90 of heads first on 16 threads. A head's part of a token is 256 to 512 bytes, 2 to 4 KB
  from the next one."""


def build() -> str:
    """cpu-threads.md."""
    result = Result.load("cpu_threads")
    by_threads, busy = tables(result.data)
    device = result.processor.split(", ")
    return page(
        "CPU: threads",
        INTRODUCTION,
        *result.sourced(
            f"## {device[0]}, {device[-1]}",
            by_threads,
            LIMITS,
            "## Beside another process",
            BUSY,
            busy,
            device=result.processor,
        ),
    )


def tables(data: dict[str, Any]) -> tuple[str, str]:
    """Times and ratios by threads, and with a busy core."""
    plain = data["limits"]
    scaling = {name: plain[0]["seconds"][name] / plain[-1]["seconds"][name] for name in plain[0]["seconds"]}
    rows = []
    for (dtype, call), group in groupby(data["rows"], key=lambda row: (row["dtype"], row["call"])):
        cells = list(group)
        for who in cells[0]["seconds"]:
            if who == "SDPA":
                continue
            taken = [cell["seconds"][who] for cell in cells]
            limit = scaling["sum" if call.startswith("decode") else "matrix product"]
            name = f"{dtype}, {call}" + who.removeprefix("ours")
            gain = taken[0] / taken[-1]
            rows.append([name, *(_cell(row, who) for row in cells), f"{gain:.1f} ({percent(gain / limit)})"])
    headings = ["call", *(_threads(row["threads"]) for row in plain), "scaling"]
    for name in scaling:
        rows.append([f"torch's {name}", *(seconds(row["seconds"][name]) for row in plain), f"{scaling[name]:.1f}"])
    return table(headings, rows), table(["call", "ours", "SDPA"], _busy(data))


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"


def _cell(row: dict[str, Any], who: str) -> str:
    taken, sdpa = row["seconds"][who], row["seconds"].get("SDPA")
    return seconds(taken) + (f" ({ratio(sdpa / taken)})" if sdpa else "")


def _busy(data: dict[str, Any]) -> list[list[str]]:
    quiet = {(row["dtype"], row["call"], row["threads"]): row["seconds"] for row in data["rows"]}
    rows = []
    for row in data["busy"]:
        before = quiet[row["dtype"], row["call"], row["threads"]]
        slower = (f"{row['seconds'][who] / before[who]:.2f}" for who in ("ours", "SDPA"))
        rows.append([f"{row['dtype']}, {row['call']}, {_threads(row['threads'])}", *slower])
    return rows
