"""What does qk_dtype="int8" save?

    python benchmarks/int8_products.py                 # this CPU, every instruction set that multiplies int8
    FASTATTENTION_CPU_ISA=amx_bf16 python benchmarks/int8_products.py  # that one, printed as JSON

Prefill with and without it takes turns with the rest of a call: the same call with int8 products of 4 elements, which
take next to no time. Exact over rest is what products that cost nothing would save; the softmax and the product of
weights and values remain. Also given: how far results are from exact ones.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import typer
from rich.table import Table

from fastattention import config, fast_attn_func
from fastattention.backends.cpu.library import available_isas, load_library
from fastattention.cli.bench.report import SCHEMA, title
from fastattention.cli.bench.timing import interleaved
from fastattention.cli.bench.workload import DTYPES
from fastattention.cli.console import OUTPUT
from fastattention.cli.machine import describe_machine

RESULTS = Path(__file__).parent / "results"
NHEADS = 2
REST_HEADDIM = 4  # of the product in "rest": one unit of int8


def main(
    seqlens: str = "4096,16384",
    headdims: str = "64,128",
    dtypes: str = "bfloat16,float32",
    seconds: float = 4.0,
    output: Path = RESULTS,
) -> None:
    """Write int8_products_cpu.json into `output`. seconds: about so many a problem, of which each list has its part."""
    problems = [
        {"dtype": dtype, "headdim": int(headdim), "causal": causal, "seqlen": int(seqlen)}
        for dtype, headdim, causal, seqlen in itertools.product(
            dtypes.split(","), headdims.split(","), (False, True), seqlens.split(",")
        )
    ]
    if config.cpu_isa() is not None:
        print(json.dumps(records_of(problems, seconds)))
        return
    records = []
    for isa in available_isas():
        # A process loads its kernels once: another instruction set is another process.
        environment = {**os.environ, "FASTATTENTION_CPU_ISA": isa}
        done = subprocess.run([sys.executable, *sys.argv], env=environment, check=True, stdout=subprocess.PIPE)
        records += json.loads(done.stdout)
    show(records)
    machine = describe_machine()
    OUTPUT.print(title(machine))
    record = {
        "schema": SCHEMA, "question": "int8_products", "machine": machine, "nheads": NHEADS, "records": records,
    }  # fmt: skip
    output.mkdir(parents=True, exist_ok=True)
    (output / "int8_products_cpu.json").write_text(json.dumps(record, indent=1) + "\n")


def records_of(problems: list[dict[str, Any]], seconds: float) -> list[dict[str, Any]]:
    """Of the instruction set in use; none where it does not multiply int8."""
    library = load_library()
    if not library.multiplies_int8:
        return []
    return [{"isa": library.isa, **problem, **measure("cpu", seconds=seconds, **problem)} for problem in problems]


def measure(device: str, dtype: str, headdim: int, causal: bool, seqlen: int, seconds: float) -> dict[str, Any]:
    """Seconds of each call, and the relative error of int8 products: of the norm of all results."""
    generator = torch.Generator(device).manual_seed(0)
    shape = (1, seqlen, NHEADS, headdim)
    q, k, v = (
        torch.randn(shape, device=device, generator=generator, dtype=torch.float32).to(DTYPES[dtype]) for _ in range(3)
    )
    attend = functools.partial(fast_attn_func, causal=causal, backend="cpu" if device == "cpu" else "cuda")
    short_q, short_k = (x[..., :REST_HEADDIM].contiguous() for x in (q, k))
    calls = {
        "exact": functools.partial(attend, q, k, v),
        "int8": functools.partial(attend, q, k, v, qk_dtype="int8"),
        "rest": functools.partial(attend, short_q, short_k, v, qk_dtype="int8"),
    }
    exact, approximate = calls["exact"]().float(), calls["int8"]().float()
    error = float((approximate - exact).norm() / exact.norm())
    return {"seconds": median_seconds(calls, seconds), "error": error}


def median_seconds(calls: Mapping[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Of each call, all of them in turns."""
    for call in calls.values():
        call()
    return {name: timing.median for name, timing in interleaved(calls, seconds).items()}


def show(records: list[dict[str, Any]]) -> None:
    """Milliseconds, and times over exact."""
    table = Table("isa", "dtype", "headdim", "causal", "tokens", "exact", "int8", "speedup", "at most", "error")
    for record in records:
        exact, int8, rest = (record["seconds"][name] for name in ("exact", "int8", "rest"))
        table.add_row(
            record["isa"], record["dtype"], str(record["headdim"]), str(record["causal"]), str(record["seqlen"]),
            f"{exact * 1e3:.1f} ms", f"{int8 * 1e3:.1f} ms", f"{exact / int8:.2f}x", f"{exact / rest:.2f}x",
            f"{record['error']:.1e}",
        )  # fmt: skip
    OUTPUT.print(table)


if __name__ == "__main__":
    typer.run(main)
