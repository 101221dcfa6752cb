"""Chunked linear attention by the CUDA kernels, which the emulator runs on the processor."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

import emulator
import pytest
import torch
from emulator import Range, Report
from linear.cases import CASES
from linear.oracle import check
from tiers import combinations, thin, tier_of

from fastattention.backends.common.params import Params
from fastattention.gpu_runtime.chips import Limits
from fastattention.gpu_runtime.module import KernelLaunch
from fastattention.linear.backends.cuda.chunk_config import PrepareConfig, PrepareKeysConfig, ScanConfig
from fastattention.linear.backends.cuda.chunk_params import ChunkParams
from fastattention.linear.backends.cuda.chunk_plan import make_chunk_plan
from fastattention.linear.problem import LinearInputs, LinearOutput, LinearProblem
from fastattention.linear.validation import prepare

LIMITS = {backend.name: backend.limits for backend in emulator.EMULATED}


class EmulatedChunks:
    """Chunked linear attention on tensors of the processor, as if on one chip."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.reports: list[Report] = []

    def run(self, problem: LinearProblem, inputs: LinearInputs) -> LinearOutput:
        self.reports.clear()
        return make_chunk_plan(problem, self.limits.arch, self.limits, self._launcher)(inputs)

    def _launcher(self, launch: KernelLaunch) -> Callable[[Params], None]:
        return lambda params: self.reports.append(emulator.launch(launch, params, ranges_of(launch, params)))


def ranges_of(launch: KernelLaunch, params: Params) -> list[Range]:
    """The memory that a kernel may access in vectors."""
    assert isinstance(params, ChunkParams)
    config = launch.variant
    chunk, headdim = config.chunk, config.headdim
    assert isinstance(config, PrepareConfig | PrepareKeysConfig | ScanConfig)
    key = isinstance(config, PrepareKeysConfig) or (isinstance(config, ScanConfig) and config.rule == "key")
    slots = params.num_slots * params.nheads
    offsets = _int32s(params.cu_seqlens, params.num_sequences + 1)
    rows = params.num_sequences if not offsets else 1
    tokens = offsets[-1] if offsets else params.seqlen
    square, scaled = slots * chunk * chunk * 2, slots * chunk * headdim * 2 * key
    sizes = {
        "scores": square,
        "inverse": square * (params.factors != params.inverse),
        "factors": slots * 4 * (headdim if key else 4 * chunk + 4),
        "q_scaled": scaled,
        "k_scaled": scaled,
        "out": rows * tokens * params.nheads * params.columns_v * 2,
    }
    ranges = [Range(getattr(params, name), size) for name, size in sizes.items() if size]
    heads_k = params.nheads // params.group_size
    for name, heads, columns in (
        ("q", heads_k, params.columns_k), ("k", heads_k, params.columns_k), ("v", params.nheads, params.columns_v)
    ):  # fmt: skip
        if rows * tokens:
            strides = [getattr(params, f"{name}_stride_{axis}") for axis in ("batch", "row", "head")]
            last = sum((size - 1) * stride for size, stride in zip((rows, tokens, heads), strides, strict=True))
            ranges.append(Range(getattr(params, name), (last + columns) * 2))
    return ranges


def _int32s(address: int | None, count: int) -> list[int]:
    return list((ctypes.c_int32 * count).from_address(address)) if address else []


@pytest.fixture(autouse=True)
def new_memory_holds_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "name" in metafunc.fixturenames:
        tier = tier_of(metafunc.config)
        runs = combinations(tier, list(CASES), list(LIMITS), [torch.float16, torch.bfloat16])
        ids = ["-".join((name, chip, str(dtype).removeprefix("torch."))) for name, chip, dtype in runs]
        metafunc.parametrize(("name", "chip", "dtype"), runs, ids=ids)


@thin(quick=7, all=3)
def test_chunks_are_as_exact_as_the_recurrence(name: str, chip: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    problem, inputs = prepare(case.tensors(dtype), case.options(chunked=True))
    check(problem, inputs, EmulatedChunks(LIMITS[chip]).run(problem, inputs))
