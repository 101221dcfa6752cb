"""The promises of every engine for every call, checked for the list of cases and for random ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from conformance.engines import Engine
from fastattention import set_num_threads
from fastattention.testing.calls import build_call, problem_of
from fastattention.testing.case import Case
from fastattention.testing.oracle import FACTOR, Expected, Results, expected_after
from fastattention.testing.written import Snapshot


def check(engine: Engine, case: Case, dtype: torch.dtype) -> None:
    """Checks all promises for the call of `case` in `dtype`; skips a call that the engine refuses."""
    reason = engine.refusal(problem_of(case, dtype))
    if reason is not None:
        pytest.skip(f"{engine.name}: {reason}")
    with engine.active():
        try:
            set_num_threads(1)
            out, lse = check_right_and_nothing_else_written(engine, case, dtype)
            check_right_without_lse(engine, case, dtype)
            set_num_threads(2)
            check_same_bits(engine, case, dtype, out, lse)
        finally:
            set_num_threads(None)


def check_right_and_nothing_else_written(engine: Engine, case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Errors are at most twice those of torch, and only appended tokens change memory. Returns out and lse."""
    call = build_call(case, dtype)
    before = Snapshot.of(call)
    out, lse = engine.run(call)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    assert_small_errors(expected_after(call, case, device=engine.device), {"out": out, "lse": lse})
    assert (fault := before.fault(case, call, dtype)) is None, fault
    return out, lse


def check_right_without_lse(engine: Engine, case: Case, dtype: torch.dtype) -> None:
    """Checks out without lse, for which a backend may take another path."""
    call = build_call(case, dtype)
    out = engine.run_without_lse(call)
    assert_small_errors(expected_after(call, case, device=engine.device), {"out": out})


def check_same_bits(engine: Engine, case: Case, dtype: torch.dtype, out: Tensor, lse: Tensor) -> None:
    """Results repeat bit for bit, with any number of threads."""
    again, lse_again = engine.run_in_another_order(build_call(case, dtype))
    assert torch.equal(out, again), "out differs when the call is repeated with other threads or in another order"
    assert torch.equal(lse, lse_again), "lse differs when the call is repeated with other threads or in another order"


def assert_small_errors(wanted: Expected, found: Results, factor: float = FACTOR) -> None:
    """Fails unless every result that was found is as near to the exact one as it must be."""
    for name, one in wanted.errors(found, factor).items():
        assert one.is_small, f"{name} is off by {one.error:.3g}; allowed are {one.allowed:.3g}"
