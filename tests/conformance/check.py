"""The promises of every engine for every call, checked for the list of cases and for random ones."""

from __future__ import annotations

import pytest
import torch

from conformance.calls import build_call, problem_of
from conformance.case import Case
from conformance.engines import Engine
from conformance.oracle import Snapshot, assert_lse_matches, assert_out_matches
from fastattention import set_num_threads


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


def check_right_and_nothing_else_written(
    engine: Engine, case: Case, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Errors are at most twice those of torch, and only appended tokens change memory. Returns out and lse."""
    call = build_call(case, dtype)
    before = Snapshot.of(call)
    out, lse = engine.run(call)
    assert_out_matches(case, out, dtype, call)
    assert_lse_matches(case, lse, dtype, call)
    before.assert_only_new_tokens_written(case, call, dtype)
    return out, lse


def check_right_without_lse(engine: Engine, case: Case, dtype: torch.dtype) -> None:
    """Checks out without lse, for which a backend may take another path."""
    call = build_call(case, dtype)
    assert_out_matches(case, engine.run_without_lse(call), dtype, call)


def check_same_bits(engine: Engine, case: Case, dtype: torch.dtype, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Results repeat bit for bit, with any number of threads."""
    again, lse_again = engine.run_in_another_order(build_call(case, dtype))
    assert torch.equal(out, again), "out differs when the call is repeated with other threads or in another order"
    assert torch.equal(lse, lse_again), "lse differs when the call is repeated with other threads or in another order"
