"""What does qk_dtype="int8" save?

    python benchmarks/int8_products.py                 # this CPU, every instruction set that multiplies int8
    FASTATTENTION_CPU_ISA=amx_bf16 python benchmarks/int8_products.py  # that one, printed as JSON
    python benchmarks/int8_products.py --device cuda   # this GPU, the code paths that do

Prefill with and without it takes turns. On a CPU a third variant takes turns, the rest of a call: the same call with
int8 products of 4 elements, which take next to no time. Exact over rest is the speedup if products were free; the
softmax and the product of weights and values remain. The errors of results are given too.
"""

from __future__ import annotations

import functools
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import typer
from harness import RESULTS, publish, run_again
from pages import int8_products
from torch import Tensor

from fastattention import environment, fast_attn_func
from fastattention.attention.validation import Options, prepare_dense
from fastattention.backends.cpu.library import available_isas, load_library
from fastattention.backends.cuda.attention.backend import CudaBackend
from fastattention.cli.bench.timing import interleaved_on_device, median_seconds
from fastattention.cli.bench.workload import DTYPES

NHEADS = 2
REST_HEADDIM = 4  # elements of the product in "rest": one unit of int8
GPU_PATHS = (80, 75)  # code paths that multiply int8
GPU_HIDDEN = 2048  # heads times headdim
GPU_ROUNDS = 15


def main(
    device: str = "cpu",
    seqlens: str = "4096,16384",
    headdims: str = "64,128",
    dtypes: str = "bfloat16,float32",
    seconds: float = 4.0,
    output: Path = RESULTS,
) -> None:
    """Write int8_products_cpu.json or int8_products_gpu.json into `output`. seconds: about, for a problem on a CPU."""
    problems: list[dict[str, Any]] = [
        {"dtype": dtype, "headdim": int(headdim), "causal": causal, "seqlen": int(seqlen)}
        for dtype, headdim, causal, seqlen in itertools.product(
            dtypes.split(","), headdims.split(","), (False, True), seqlens.split(",")
        )
    ]
    if device != "cpu":
        name, records = "int8_products_gpu", [gpu_record(arch, **one) for arch in GPU_PATHS for one in problems]
    elif environment.cpu_isa() is not None:
        print(json.dumps(records_of(problems, seconds)))
        return
    else:
        # A process loads its kernels once, so each instruction set has a process.
        of_isas = (run_again(*sys.argv, FASTATTENTION_CPU_ISA=isa) for isa in available_isas())
        name, records = "int8_products_cpu", list(itertools.chain.from_iterable(of_isas))
    figures = {"question": "int8_products", "records": records}
    publish(output / f"{name}.json", figures, int8_products.times(records))


def records_of(problems: list[dict[str, Any]], seconds: float) -> list[dict[str, Any]]:
    """Records of the instruction set in use; empty where it does not multiply int8."""
    library = load_library()
    if not library.multiplies_int8:
        return []
    return [{"path": library.isa, **problem, **measure(seconds=seconds, **problem)} for problem in problems]


def gpu_record(arch: int, dtype: str, headdim: int, causal: bool, seqlen: int) -> dict[str, Any]:
    """The record of a code path of this GPU."""
    nheads = GPU_HIDDEN // headdim
    q, k, v = tensors("cuda", dtype, (1, seqlen, nheads, headdim))
    backend = CudaBackend(arch)
    problems = {
        name: prepare_dense(q, k, v, options=Options(causal=causal, qk_dtype=qk_dtype))
        for name, qk_dtype in (("exact", None), ("int8", "int8"))
    }
    calls: dict[str, Callable[[], object]] = {
        name: functools.partial(backend.forward, *prepared) for name, prepared in problems.items()
    }
    exact, approximate = (backend.forward(*prepared).out for prepared in problems.values())
    return {
        "path": f"sm{arch}", "dtype": dtype, "headdim": headdim, "causal": causal, "seqlen": seqlen, "nheads": nheads,
        "seconds": interleaved_on_device(calls, GPU_ROUNDS), "error": relative_error(approximate, exact),
    }  # fmt: skip


def tensors(device: str, dtype: str, shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v, the same in every run."""
    generator = torch.Generator(device).manual_seed(0)
    q, k, v = (
        torch.randn(shape, device=device, generator=generator, dtype=torch.float32).to(DTYPES[dtype]) for _ in range(3)
    )
    return q, k, v


def relative_error(approximate: Tensor, exact: Tensor) -> float:
    """The error relative to the norm of all results."""
    return float((approximate.float() - exact.float()).norm() / exact.float().norm())


def measure(dtype: str, headdim: int, causal: bool, seqlen: int, seconds: float) -> dict[str, Any]:
    """Seconds of each call on this CPU, and the error of int8 products."""
    q, k, v = tensors("cpu", dtype, (1, seqlen, NHEADS, headdim))

    def attend(q: Tensor, k: Tensor, v: Tensor, qk_dtype: str | None = None) -> Tensor:
        return fast_attn_func(q, k, v, causal=causal, qk_dtype=qk_dtype, backend="cpu")

    short_q, short_k = (x[..., :REST_HEADDIM].contiguous() for x in (q, k))
    in_int8 = functools.partial(attend, q, k, v, qk_dtype="int8")
    calls = {
        "exact": functools.partial(attend, q, k, v),
        "int8": in_int8,
        "rest": functools.partial(attend, short_q, short_k, v, qk_dtype="int8"),
    }
    return {
        "nheads": NHEADS,
        "seconds": median_seconds(calls, seconds),
        "error": relative_error(in_int8(), attend(q, k, v)),
    }


if __name__ == "__main__":
    typer.run(main)
