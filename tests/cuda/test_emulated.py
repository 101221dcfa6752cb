"""The list of cases on the kernels of every architecture, emulated, and what these refuse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import emulator
import pytest
import torch
from conformance.calls import build_call
from conformance.case import Case
from conformance.cases import BIASES, CASES, LONG, MANY_QUERIES, SCORES, VALUE_HEADDIMS
from conformance.check import check
from conformance.engines import RegisteredEngine
from conformance.ragged_cases import RAGGED
from decode_cases import DECODE_TILES, MANY_KEYS, is_plain
from emulator import EmulatedCudaBackend

from fastattention.backends import registry
from fastattention.backends.cuda.jit.variants import Feature, variants_of
from fastattention.backends.cuda.kernel_config import Variant
from fastattention.backends.cuda.plan import make_plan
from fastattention.errors import ArgumentError
from fastattention.problem import Problem
from fastattention.validation import Options, prepare_dense


class EmulatedEngine(RegisteredEngine):
    """One of the emulator's backends."""

    @property
    def registered(self) -> dict[str, str]:
        backends = (*emulator.EMULATED, emulator.EmulatedSingleSm80)
        return {backend.name: f"emulator:{backend.__name__}" for backend in backends}


class Run(NamedTuple):
    """One test of the list."""

    case: Case
    dtype: torch.dtype
    backend: type[EmulatedCudaBackend]

    @property
    def name(self) -> str:
        return f"{self.case.name}-{str(self.dtype).removeprefix('torch.')}-{self.backend.name}"

    @property
    def is_new(self) -> bool:
        """Whether no other run does the same."""
        if self.backend.limits.arch >= 80:
            return True
        return self.case not in FOR_ONE_PATH and (self.dtype is torch.float16 or self.case in CONVERTED)


# Where bfloat16 is computed in float16 only conversions are new.
CONVERTED = [*VALUE_HEADDIMS, *SCORES, *BIASES, *(case for case in DECODE_TILES if is_plain(case)), *RAGGED]
# Older paths have no tiles for so many queries.
FOR_ONE_PATH = MANY_QUERIES
# A case of working memory, which kernels have none of, and four seconds on a processor.
LEFT_OUT = [case for case in LONG if case.name == "many-heads"]

DTYPES = (torch.float16, torch.bfloat16)

# Backends vary fastest, so that the expected result of a case is computed once.
RUNS = [
    run
    for case in [*CASES, *DECODE_TILES]
    for dtype in DTYPES
    for run in (Run(case, dtype, backend) for backend in emulator.EMULATED)
    if run.is_new and case not in LEFT_OUT
] + [Run(case, dtype, emulator.EmulatedSingleSm80) for case in MANY_KEYS for dtype in DTYPES]


@pytest.fixture(scope="module", autouse=True)
def libraries(request: pytest.FixtureRequest) -> None:
    """Compiles what the selected tests need, on all processors at once."""
    params = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    runs = [param["run"] for param in params if isinstance(param.get("run"), Run)]
    emulator.build_all({variant for run in runs for variant in variants_for(run)})


def problem_of(case: Case, dtype: torch.dtype) -> Problem:
    problem, _ = build_call(case, dtype).prepare()
    return problem


def variants_for(run: Run) -> set[Variant]:
    """The kernels that a run needs."""
    plan = make_plan(problem_of(run.case, run.dtype), run.backend.limits.arch, run.backend.limits)
    append = [] if plan.append is None else [plan.append]
    return {step.variant for step in (*append, *plan.attention)}


@pytest.mark.parametrize("backend", emulator.EMULATED, ids=[backend.name for backend in emulator.EMULATED])
def test_the_list_runs_every_kernel(backend: type[EmulatedCudaBackend]) -> None:
    """Of those that convert bfloat16 the plain ones: in others nothing else is converted."""
    arch = backend.limits.arch
    ran = {variant for run in RUNS if run.backend.limits.arch == arch for variant in variants_for(run)}
    plain = variants_of(backend.limits, features=[Feature.PLAIN])
    everything = variants_of(backend.limits, dtypes=DTYPES if arch >= 80 else DTYPES[:1])
    missing = [kernel.name for kernel in [*plain, *everything] if kernel not in ran]
    assert missing == []


@pytest.mark.parametrize("run", RUNS, ids=[run.name for run in RUNS])
def test_is_right_repeats_and_writes_nothing_else(run: Run) -> None:
    check(EmulatedEngine(run.backend.name), run.case, run.dtype)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_only_float32_is_refused(case: Case) -> None:
    """The other tests skip what is refused."""
    for dtype in (*DTYPES, torch.float32):
        problem = problem_of(case, dtype)
        for backend in emulator.EMULATED:
            reason = backend().why_not(problem)
            if dtype is torch.float32:
                assert reason is not None
                assert "float32" in reason
            else:
                assert reason is None


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"dropout_p": 0.1}, "dropout_p=0.1"),
        ({"needs_grad": True}, "gradient"),
        ({"headdim": 264}, "headdim=264"),
        ({"headdim_v": 264}, "headdim_v=264"),
    ],
    ids=["dropout", "gradients", "headdim", "headdim-v"],
)
def test_a_refusal_names_what_is_not_served(fields: dict[str, Any], named: str) -> None:
    problem = problem_of(CASES[0], torch.float16)
    for backend in emulator.EMULATED:
        assert backend().why_not(problem) is None
        reason = backend().why_not(replace(problem, **fields))
        assert reason is not None
        assert named in reason


def test_emulated_backends_are_not_registered() -> None:
    with EmulatedEngine("cuda-sm80").active():
        assert "cuda-sm80" in registry.ORDER
    assert not {backend.name for backend in emulator.EMULATED} & set(registry.ORDER)


def test_bfloat16_beyond_float16_is_refused_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (torch.ones(1, 3, 1, 32, dtype=torch.bfloat16) for _ in range(3))
    v[0, 1] = 1e5
    backend = emulator.EmulatedSm70()
    problem, inputs = prepare_dense(q, k, v, Options())
    assert backend.forward(problem, inputs).out.isinf().all()
    monkeypatch.setenv("FASTATTENTION_CHECK_RANGE", "1")
    with pytest.raises(ArgumentError, match=r"v holds 9\.\d+e\+04.*float16, which ends at 65504"):
        backend.forward(problem, inputs)
