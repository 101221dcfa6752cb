"""Dropout: every engine keeps the weights that backends/common/dropout.py says, forward and backward."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tiers import sampled
from torch import Tensor

from conformance.calls import Call, build_call, problem_of
from conformance.case import Case
from conformance.cases import CASES
from conformance.engines import ENGINES, Engine
from conformance.oracle import FACTOR, largest, largest_error, out_floor
from conformance.test_gradients import gradients, names
from fastattention.attention.reference import reference_attention
from fastattention.backends.common.dropout import kept
from fastattention.backends.common.gradients import COMPUTED

DROPOUT_P = 0.3
NAMES = [
    "seqlens-129x127", "seqlens-1x1", "causal-300x128", "heads-6-of-2", "everything", "sinks", "varlen-sinks",
    "varlen-window-gqa", "varlen-pages-16", "few-queries-rows", "few-queries-scores",
    "blocks-scores",
]  # fmt: skip
DROPOUT_CASES = [case for case in CASES if case.name in NAMES]
every_case = pytest.mark.parametrize("case", DROPOUT_CASES, ids=[case.name for case in DROPOUT_CASES])
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
every_engine = pytest.mark.parametrize("engine", ENGINES, ids=[engine.name for engine in ENGINES])


def seed_drawn_by(torch_seed: int) -> Tensor:
    """The seed that a call draws after torch.manual_seed."""
    torch.manual_seed(torch_seed)
    return torch.randint(2**62, (), dtype=torch.int64)


def kept_weights(call: Call, torch_seed: int) -> Tensor:
    problem, _ = call.prepare()
    sequences, rows, keys = (slice(0, n) for n in (problem.batch_size, problem.seqlen_q, problem.seqlen_k))
    return kept(seed_drawn_by(torch_seed), DROPOUT_P, sequences, problem.nheads, rows, keys)


def through_reference(call: Call, compute_dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    problem, inputs = call.prepare()
    keep = kept_weights(call, 0)
    out, lse, _ = reference_attention(replace(problem, dropout_p=DROPOUT_P), inputs, compute_dtype, keep)
    assert lse is not None
    return out, lse


def through(engine: Engine, call: Call) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    out, lse = call.function(**call.arguments, dropout_p=DROPOUT_P, return_lse=True, backend=engine.backend)
    return out, lse


def skip_where_refused(engine: Engine, case: Case, dtype: torch.dtype, *grads: str) -> None:
    problem = replace(problem_of(case, dtype), dropout_p=DROPOUT_P, grads=grads)
    if (reason := engine.refusal(problem)) is not None:
        pytest.skip(reason)


@sampled
@every_case
@every_dtype
@every_engine
def test_out_is_that_of_the_weights_kept(engine: Engine, dtype: torch.dtype, case: Case) -> None:
    skip_where_refused(engine, case, dtype)
    with engine.active():
        out, lse = through(engine, build_call(case, dtype))
    exact, exact_lse = through_reference(build_call(case, dtype), torch.float64)
    usual, _ = through_reference(build_call(case, dtype), None)
    allowed = FACTOR * largest_error(usual, exact) + out_floor(case, dtype) / (1.0 - DROPOUT_P)
    assert largest_error(out, exact) <= allowed
    torch.testing.assert_close(lse, exact_lse.float(), rtol=1e-2, atol=1e-2)


@sampled
@every_case
@every_dtype
@every_engine
def test_gradients_are_those_of_the_weights_kept(engine: Engine, dtype: torch.dtype, case: Case) -> None:
    wanted = names(case, COMPUTED)
    skip_where_refused(engine, case, dtype, *wanted)
    exact = gradients(case, dtype, lambda call: through_reference(call, torch.float64), wanted)
    usual = gradients(case, dtype, lambda call: through_reference(call, None), wanted)
    with engine.active():
        actual = gradients(case, dtype, lambda call: through(engine, call), wanted)
    floor = out_floor(case, dtype) / (1.0 - DROPOUT_P)
    for name, right, by_torch, ours in zip(wanted, exact, usual, actual, strict=True):
        right = right.double()
        allowed = FACTOR * largest_error(by_torch, right) + floor * max(1.0, largest(right))
        assert largest_error(ours, right) <= allowed, f"the gradient of {name}"


@every_case
def test_the_mask_that_comes_back_is_the_one_that_was_applied(case: Case) -> None:
    call = build_call(case, torch.float32)
    torch.manual_seed(0)
    arguments = {**call.arguments, "dropout_p": DROPOUT_P, "return_attn_probs": True}
    _, _, mask = call.function(**arguments)
    assert torch.equal(mask > 0, kept_weights(call, 0) & (mask != 0))
    dropped, count = int((mask < 0.0).sum()), int((mask != 0.0).sum())
    assert abs(dropped - DROPOUT_P * count) < 6.0 * math.sqrt(DROPOUT_P * (1.0 - DROPOUT_P) * count)


@every_engine
def test_the_mask_is_that_of_torch_s_seed(engine: Engine) -> None:
    case = DROPOUT_CASES[0]
    skip_where_refused(engine, case, torch.float32)
    with engine.active():
        outs = []
        for torch_seed in (1, 1, 2):
            call = build_call(case, torch.float32)
            torch.manual_seed(torch_seed)
            outs.append(call.function(**call.arguments, dropout_p=DROPOUT_P, backend=engine.backend))
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])


def test_every_named_case_exists() -> None:
    assert len(DROPOUT_CASES) == len(NAMES)
