"""The kernel of linear attention that goes token by token, emulated: cases, memory, dtypes of gates, refusals."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, NamedTuple

import emulator
import pytest
import torch
from emulated_linear import EmulatedLinear, guarded_inputs
from linear.cases import CASES
from linear.check import check
from tiers import covering, sampled, tier_of

from fastattention.backends.cuda.linear.step_config import DTYPES, StepConfig, step_variants
from fastattention.backends.cuda.linear.step_heuristics import choose_step
from fastattention.gpu_runtime.chips import CHIPS
from fastattention.linear.problem import LinearInputs, LinearOutput, LinearProblem
from fastattention.linear.validation import prepare
from fastattention.testing.linear import LinearCase

# Tiles are wide where there is a CTA for every multiprocessor. Nothing else differs among GPUs: there is one code path.
SMS = {"wide": 1, "narrow": 1000}


class Run(NamedTuple):
    """One test of the list."""

    case: str
    tiles: str
    dtype: torch.dtype

    @property
    def name(self) -> str:
        return f"{self.case}-{self.tiles}-{str(self.dtype).removeprefix('torch.')}"


RUNS = [Run(*each) for each in itertools.product(CASES, SMS, DTYPES)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "run" in metafunc.fixturenames:
        runs = covering(
            tier_of(metafunc.config), RUNS, parameters=lambda run: {**run._asdict(), "case": CASES[run.case]}
        )
        metafunc.parametrize("run", runs, ids=[run.name for run in runs])


def prepared(case: LinearCase, dtype: torch.dtype, offset: int = 0) -> tuple[LinearProblem, LinearInputs]:
    return prepare(guarded_inputs(case.tensors(dtype), offset), case.options(chunked=False))


def attend(problem: LinearProblem, inputs: LinearInputs, tiles: str = "wide") -> LinearOutput:
    return EmulatedLinear(SMS[tiles]).make_call(problem, inputs)(inputs)


def assert_equal(one: LinearOutput, other: LinearOutput) -> None:
    assert torch.equal(one.out, other.out)
    assert one.final_state is not None
    assert other.final_state is not None
    assert torch.equal(one.final_state, other.final_state)


def test_results_are_right(run: Run) -> None:
    problem, inputs = prepared(CASES[run.case], run.dtype)
    check(problem, inputs, attend(problem, inputs, run.tiles))


def test_the_list_runs_every_kernel() -> None:
    problems = [(prepared(CASES[run.case], run.dtype)[0], SMS[run.tiles]) for run in RUNS]
    assert {choose_step(problem, num_sms) for problem, num_sms in problems} == set(step_variants())


@pytest.mark.parametrize("rule", ["delta", "key", "kda"])
@pytest.mark.parametrize("headdim_v", [64, 62], ids=["aligned-rows", "odd-rows"])
def test_memory_may_begin_anywhere(rule: str, headdim_v: int) -> None:
    case = LinearCase(rule, seqlen=5, headdim_v=headdim_v, initial_state=True)
    for offset in range(1, 4):
        problem, inputs = prepared(case, torch.float16, offset)
        check(problem, inputs, attend(problem, inputs))


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "initial_state"])
def test_any_axis_but_the_last_may_have_gaps(name: str) -> None:
    case = LinearCase(batch_size=2, seqlen=5, nheads=4, headdim_k=40, headdim_v=24, initial_state=True)
    given = case.tensors(torch.float16)
    problem, inputs = prepare(given, case.options(chunked=False))
    expected = attend(problem, inputs)
    tensor = getattr(inputs, name)
    memory = torch.full(
        [2 * size + 1 for size in tensor.shape[:-1]] + [tensor.shape[-1]], torch.nan, dtype=tensor.dtype
    )
    apart = memory[1::2, 1::2, 1::2] if tensor.ndim == 4 else memory[1::2, 1::2]
    assert_equal(attend(problem, inputs._replace(**{name: apart.copy_(tensor)})), expected)


@sampled
@pytest.mark.parametrize("beta_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("g_dtype", DTYPES, ids=str)
def test_gates_and_beta_have_dtypes_of_their_own(g_dtype: torch.dtype, beta_dtype: torch.dtype) -> None:
    case = LinearCase(seqlen=20)
    given = case.tensors(torch.float16)
    assert given.beta is not None
    given = given._replace(g=given.g.to(g_dtype), beta=given.beta.to(beta_dtype))
    problem, inputs = prepare(given, case.options(chunked=False))
    check(problem, inputs, attend(problem, inputs))


@pytest.mark.parametrize("rule", ["delta", "key", "kda"])
def test_a_gate_of_minus_infinity_forgets_what_was_before(rule: str) -> None:
    problem, inputs = prepared(LinearCase(rule, seqlen=6, initial_state=True), torch.float16)
    inputs.g[:, 3] = -torch.inf
    result = attend(problem, inputs)
    check(problem, inputs, result)
    assert inputs.initial_state is not None
    inputs.initial_state.mul_(-5.0)
    again = attend(problem, inputs)
    assert torch.equal(result.out[:, 3:], again.out[:, 3:])
    assert not torch.equal(result.out[:, :3], again.out[:, :3])


def test_results_do_not_depend_on_the_order_of_ctas_and_warps() -> None:
    problem, inputs = prepared(replace(CASES["delta-varlen"], headdim_k=128), torch.float16)
    result = attend(problem, inputs)
    for seed in (1, 2):
        with emulator.shuffled(seed):
            assert_equal(attend(problem, inputs), result)


def test_inputs_are_left_as_they_are() -> None:
    problem, inputs = prepared(CASES["delta-grouped"], torch.float16)
    before = [None if x is None else x.clone() for x in inputs]
    attend(problem, inputs)
    assert all(x is None or torch.equal(x, y) for x, y in zip(inputs, before, strict=True))


def test_a_plan_serves_other_numbers_at_other_addresses() -> None:
    case = CASES["delta-one-token"]
    problem, inputs = prepared(case, torch.float16)
    call = EmulatedLinear(num_sms=1).make_call(problem, inputs)
    for _ in range(2):
        other = LinearInputs(*(None if x is None else x.flip(0) for x in guarded_inputs(inputs, offset=3)))
        check(problem, other, call(other))


def test_one_token_after_the_other_is_all_at_once() -> None:
    """The state that a call returns is where the next one begins."""
    case = LinearCase(seqlen=4, headdim_k=128)
    problem, inputs = prepared(case, torch.float16)
    expected = attend(problem, inputs)
    state, outs = None, []
    for token in range(case.seqlen):
        part = [None if x is None else x[:, token : token + 1] for x in inputs[:5]]
        result = attend(*prepare(LinearInputs(*part, state, None), case.options(chunked=False)))
        state = result.final_state
        outs.append(result.out)
    assert state is not None
    assert_equal(LinearOutput(torch.cat(outs, dim=1), state), expected)


@pytest.mark.parametrize("case", [LinearCase(batch_size=0), LinearCase(seqlens=())], ids=["batch", "varlen"])
def test_nothing_is_launched_for_nothing(case: LinearCase) -> None:
    problem, inputs = prepared(case, torch.float16)
    backend = EmulatedLinear(num_sms=1)
    result = backend.make_call(problem, inputs)(inputs)
    assert result.out.shape == problem.out_shape
    assert result.final_state is not None
    assert result.final_state.shape == problem.state_shape
    assert backend.launches == []


@pytest.mark.parametrize("tiles", SMS)
def test_shared_memory_has_no_bank_conflicts(tiles: str) -> None:
    problem, inputs = prepared(LinearCase(seqlen=3, headdim_k=128), torch.float16)
    backend = EmulatedLinear(SMS[tiles])
    backend.make_call(problem, inputs)(inputs)
    (report,) = backend.reports
    for wavefronts in (report.loads, report.stores):
        assert wavefronts.counted == wavefronts.ideal > 0


@pytest.mark.parametrize(
    ("states", "headdim_k", "headdim_v", "num_sms", "columns", "num_warps"),
    [
        (16, 128, 128, 132, 16, 4),
        (128, 128, 128, 132, 32, 4),
        (1000, 64, 16, 132, 16, 2),
        (33, 256, 128, 132, 32, 8),
        (1, 1, 1, 56, 16, 1),
    ],
)
def test_tiles_follow_from_states_and_the_gpu(
    states: int, headdim_k: int, headdim_v: int, num_sms: int, columns: int, num_warps: int
) -> None:
    case = LinearCase(nheads=states, nheads_k=1, seqlen=1, headdim_k=headdim_k, headdim_v=headdim_v)
    problem, _ = prepare(case.tensors(torch.float16), case.options(chunked=False))
    assert choose_step(problem, num_sms) == StepConfig(torch.float16, False, True, columns, num_warps)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"grads": ("q",), "dtype": torch.float32}, "gradients of float32 are not served"),
        ({"chunked": True, "dtype": torch.float32}, "chunks of float32 are not served"),
        ({"device": torch.device("meta")}, "tensors are on meta"),
        ({"num_sequences": 2**29}, f"{2**30} states are more than one launch takes"),
    ],
    ids=["gradients", "chunks", "device", "states"],
)
def test_a_refusal_says_why(change: dict[str, Any], reason: str) -> None:
    problem, _ = prepared(CASES["delta-plain"], torch.float16)
    backend = EmulatedLinear(num_sms=1)
    assert backend.why_not(problem) is None
    refusal = backend.why_not(replace(problem, **change))
    assert refusal is not None
    assert reason in refusal


def test_gradients_need_shared_memory() -> None:
    problem, _ = prepared(CASES["delta-headdim-256"], torch.float16)
    backend = EmulatedLinear(num_sms=1)
    assert backend.why_not(replace(problem, grads=("q",))) is None
    backend.limits = CHIPS["P100"]
    assert backend.why_not(problem) is None
    refusal = backend.why_not(replace(problem, grads=("q",)))
    assert refusal is not None
    assert "no kernels for gradients with headdim_k=256 fit this GPU" in refusal
