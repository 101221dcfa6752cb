"""Which gradients of which cases are compared, and with what."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from conformance.cases import CASES, LONG
from conformance.check import assert_small_errors
from conformance.engines import ENGINES, Engine
from fastattention.attention.backend import ATTENTION_BACKENDS
from fastattention.backends.common.gradients import COMPUTED
from fastattention.testing.calls import build_call, problem_of
from fastattention.testing.case import Case, DenseCase, VarlenCase
from fastattention.testing.oracle import Results, expected, present, results_of

OURS = [engine for engine in ENGINES if ATTENTION_BACKENDS.get(engine.backend).has_backward]
every_backward = pytest.mark.parametrize("engine", OURS, ids=[engine.name for engine in OURS])


def has_gradients(case: Case) -> bool:
    """Cases that take long are left out, and a row whose lse is -3e38: what its keys add to that is below rounding."""
    if not isinstance(case, (DenseCase, VarlenCase)) or case.batch_size == 0 or case in LONG or case.qk_dtype:
        return False
    if isinstance(case, VarlenCase) and case.quantized:
        return False
    return not (case.bias is not None and case.bias.finite and case.bias.hides == "rows")


GRADIENT_CASES = [case for case in CASES if has_gradients(case)]


def in_order(case: Case) -> Case:
    """The case with gradients that are added in the same order in every run."""
    return replace(case, name=f"{case.name}-in-order", deterministic=True)


def check_gradients(engine: Engine, case: Case, dtype: torch.dtype) -> Results:
    """Errors of gradients, and of what they follow from, are at most twice those of torch. Skips where refused."""
    grads = present(case, COMPUTED)
    reason = engine.refusal(replace(problem_of(case, dtype), grads=grads))
    if reason is not None:
        pytest.skip(reason)
    with engine.active():
        found = results_of(build_call(case, dtype), engine.run, grads)
    assert_small_errors(expected(case, dtype, grads, device=engine.device), found)
    return found
