"""The mask of dropout: it follows from torch's seed, and comes back as it was applied."""

from __future__ import annotations

import math

import pytest
import torch

from conformance.cases import DROPOUT
from conformance.dropout_cases import DROPOUT_P
from conformance.engines import Engine, every_engine
from fastattention.testing.calls import SEED, build_call, problem_of
from fastattention.testing.case import Case
from fastattention.testing.oracle import kept_weights


@pytest.mark.parametrize("case", DROPOUT, ids=[case.name for case in DROPOUT])
def test_the_mask_that_comes_back_is_the_one_that_was_applied(case: Case) -> None:
    call = build_call(case, torch.float32)
    torch.manual_seed(SEED)
    _, _, mask = call.function(**call.arguments, return_attn_probs=True)
    problem, _ = call.prepare()
    assert torch.equal(mask > 0, kept_weights(problem) & (mask != 0))
    dropped, count = int((mask < 0.0).sum()), int((mask != 0.0).sum())
    assert abs(dropped - DROPOUT_P * count) < 6.0 * math.sqrt(DROPOUT_P * (1.0 - DROPOUT_P) * count)


@every_engine
def test_the_mask_is_that_of_torch_s_seed(engine: Engine) -> None:
    case = DROPOUT[0]
    if (reason := engine.refusal(problem_of(case, torch.float32))) is not None:
        pytest.skip(reason)
    with engine.active():
        outs = []
        for torch_seed in (1, 1, 2):
            call = build_call(case, torch.float32)
            torch.manual_seed(torch_seed)
            outs.append(call.function(**call.arguments, backend=engine.backend))
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])
