"""Gradients of linear attention by the CUDA kernels, which the emulator runs on the processor."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace

import emulator
import pytest
import torch
from conformance.check import assert_small_errors
from emulated_chunks import LIMITS, EmulatedChunks, sliced
from emulated_linear import guarded_inputs
from linear.cases import CASES
from linear.check import as_in_float16
from tiers import covering_paths, tier_of
from torch import Tensor

from fastattention.backends.cuda.linear.chunk_heuristics import choose_gradient_kernels
from fastattention.gpu_runtime.chips import CHIPS
from fastattention.linear.problem import LinearGradients, LinearInputs, LinearProblem
from fastattention.linear.validation import prepare
from fastattention.testing.linear import LinearCase, expected_gradients, leaves_of, random_gradients

RULES = ("delta", "head", "key", "kda", "ssd")
# The length of a key with one element is that element, and what is across the key is 0 but for rounding.
CHECKED = {name: case for name, case in CASES.items() if name != "kda-headdim-1"}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        names = {case: name for name, case in CHECKED.items()}
        runs = [
            run
            for run in itertools.product(names, LIMITS, [torch.float16, torch.bfloat16])
            if _has_kernels(run[0], run[1], run[2])
        ]
        runs = covering_paths(tier_of(metafunc.config), runs, lambda run: _path_of(run[0]))
        ids = ["-".join((names[case], chip, str(dtype).removeprefix("torch."))) for case, chip, dtype in runs]
        metafunc.parametrize(("case", "chip", "dtype"), runs, ids=ids)


def _has_kernels(case: LinearCase, chip: str, dtype: torch.dtype) -> bool:
    problem, _ = prepare(replace(case, seqlen=1, seqlens=None).tensors(dtype), case.options(chunked=True))
    return choose_gradient_kernels(problem, LIMITS[chip].arch, LIMITS[chip]) is not None


def _path_of(case: LinearCase) -> str:
    return f"{case.overwrites}-{case.rule in ('key', 'kda')}"


def differentiated(given: LinearInputs, case: LinearCase) -> tuple[LinearProblem, LinearInputs]:
    """The call, with gradients of all tensors that hold floats."""
    problem, inputs = prepare(given._replace(**leaves_of(given)), case.options(chunked=True))
    return problem, LinearInputs(*(None if x is None else x.detach() for x in inputs))


def weights(problem: LinearProblem) -> LinearGradients:
    """The gradients of results that `expected_gradients` takes."""
    shapes = [problem.out_shape, problem.state_shape][: 1 + problem.returns_state]
    out, *states = random_gradients(shapes, problem.dtype)
    return LinearGradients(out, states[0].float() if states else None)


def gradients(given: LinearInputs, case: LinearCase, chip: str = "cuda-sm80") -> Mapping[str, Tensor]:
    problem, inputs = differentiated(given, case)
    return EmulatedChunks(LIMITS[chip]).gradients(problem, guarded_inputs(inputs), weights(problem))


def check(given: LinearInputs, case: LinearCase, chip: str = "cuda-sm80") -> None:
    """Errors are at most twice those of torch in the same precision, beside a few roundings."""
    problem, inputs = differentiated(given, case)
    found = gradients(given, case, chip)
    for name, gradient in found.items():
        tensor = getattr(given, name)
        assert (gradient.shape, gradient.dtype) == (tensor.shape, tensor.dtype)
        assert gradient.is_contiguous()
    wanted = expected_gradients(problem, inputs)
    if LIMITS[chip].arch < 80:
        wanted = as_in_float16(wanted)
    assert_small_errors(wanted, {f"gradient of {name}": x for name, x in found.items()})


def test_gradients_are_as_exact_as_those_of_torch(case: LinearCase, chip: str, dtype: torch.dtype) -> None:
    check(case.tensors(dtype), case, chip)


@pytest.mark.parametrize("rule", ["delta", "key"])
def test_strides_and_addresses_may_be_odd(rule: str) -> None:
    case = CASES[f"{rule}-plain"]
    given = case.tensors(torch.float16)
    aligned, odd = (
        gradients(given, case),
        gradients(LinearInputs(*(x if x is None else sliced(x) for x in given)), case),
    )
    assert all(torch.equal(odd[name], aligned[name]) for name in aligned)


@pytest.mark.parametrize("rule", RULES)
def test_order_of_ctas_and_warps_changes_nothing(rule: str) -> None:
    case = CASES[f"{rule}-varlen"]
    given = case.tensors(torch.float16)
    first = gradients(given, case)
    with emulator.shuffled(7):
        second = gradients(given, case)
    assert all(torch.equal(second[name], first[name]) for name in first)


@pytest.mark.parametrize("result", ["out", "final_state"])
@pytest.mark.parametrize("rule", ["delta", "key"])
def test_one_result_alone_may_have_a_gradient(rule: str, result: str) -> None:
    """A result without one counts as one whose gradient is 0."""
    case = CASES[f"{rule}-plain"]
    problem, inputs = differentiated(case.tensors(torch.float16), case)
    grads = weights(problem)
    one = LinearGradients(*(x if name == result else None for name, x in grads._asdict().items()))
    zeros = LinearGradients(*(x if name == result else torch.zeros_like(x) for name, x in grads._asdict().items()))
    engine = EmulatedChunks(LIMITS["cuda-sm80"])
    found, expected = (engine.gradients(problem, inputs, x) for x in (one, zeros))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("rule", ["delta", "kda"])
def test_tokens_may_have_no_key_query_or_beta(rule: str) -> None:
    """Rows of zeros have lengths of 0. Without beta a token writes nothing, but beta has a gradient."""
    case = LinearCase(rule, seqlen=70)
    given = case.tensors(torch.float16)
    given.k[:, 10] = 0
    given.q[:, 20] = 0
    assert given.beta is not None
    given.beta[:, 30] = 0
    check(given, case)


@pytest.mark.parametrize("rule", ["head", "kda"])
def test_a_gate_may_forget_everything(rule: str) -> None:
    """Gates are 0, within and at the borders of parts. Gradients are those of gates that are almost 0."""
    case = LinearCase(rule, seqlen=130, initial_state=True)
    given, almost = case.tensors(torch.float16), case.tensors(torch.float16)
    for inputs, gate in ((given, -torch.inf), (almost, -1e4)):
        inputs.g[:, [5, 15, 16, 40, 63, 64, 65, 111]] = gate
    found, expected = gradients(given, case), gradients(almost, case)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    check(almost, case)


def test_small_gradients_survive_float16() -> None:
    """On GPUs without bfloat16, kernels get multiples of gradients that fit float16."""
    case = CASES["delta-plain"]
    problem, inputs = differentiated(case.tensors(torch.bfloat16), case)
    grads, factor = weights(problem), 2.0**-40
    small = LinearGradients(*(x if x is None else x * factor for x in grads))
    engine = EmulatedChunks(LIMITS["cuda-sm75"])
    found, expected = engine.gradients(problem, inputs, small), engine.gradients(problem, inputs, grads)
    assert all(torch.equal(found[name], expected[name] * factor) for name in expected)


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("rule", RULES)
def test_kernels_fit_every_chip(chip: str, rule: str) -> None:
    """Wide keys do not fit the shared memory of some."""
    widest = {"P100": 128, "GTX 1080": 128}.get(chip, 256)
    if rule == "kda":
        widest = {"P100": 64, "GTX 1080": 64, "A100": 256, "H100": 256}.get(chip, 128)
    if (chip, rule) == ("T4", "key"):
        widest = 128
    limits = CHIPS[chip]
    for headdim_k, headdim_v in itertools.product((1, 64, 65, 128, 256), (1, 48, 128, 256)):
        case = LinearCase(rule, seqlen=1, headdim_k=headdim_k, headdim_v=headdim_v)
        problem, _ = prepare(case.tensors(torch.float16), case.options(chunked=True))
        kernels = choose_gradient_kernels(problem, limits.arch, limits)
        assert (kernels is not None) == (headdim_k <= widest)
        if kernels is None:
            continue
        assert max(config.shared_bytes for config in kernels) <= limits.shared_per_cta
        assert len({config.chunk for config in kernels}) == 1
