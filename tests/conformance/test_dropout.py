"""Dropout: the mask that comes back is the one that was applied, and it drops as often as it was asked to."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from conformance.calls import build_call
from conformance.case import Case
from conformance.cases import CASES
from conformance.oracle import FACTOR, largest_error, out_floor
from fastattention.backends.registry import ORDER, verdict
from fastattention.reference import reference_attention

NAMES = ["seqlens-129x127", "causal-300x128", "heads-6-of-2", "everything", "varlen-window-gqa", "varlen-pages-16"]
DROPOUT_CASES = [case for case in CASES if case.name in NAMES]


@pytest.mark.parametrize("backend", ORDER)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", DROPOUT_CASES, ids=[case.name for case in DROPOUT_CASES])
def test_out_is_that_of_the_returned_mask(case: Case, dtype: torch.dtype, backend: str) -> None:
    call = build_call(case, dtype)
    problem, inputs = call.prepare()
    problem = replace(problem, dropout_p=0.3)
    reason = verdict(problem, backend).reason
    if reason is not None:
        pytest.skip(reason)
    torch.manual_seed(0)
    arguments = {**call.arguments, "dropout_p": 0.3, "return_attn_probs": True, "backend": backend}
    out, lse, mask = call.function(**arguments)
    keep = ~mask.signbit()
    exact = reference_attention(problem, inputs, dropout_keep=keep)
    usual = reference_attention(problem, inputs, None, dropout_keep=keep)
    assert exact.lse is not None
    allowed = FACTOR * largest_error(usual.out, exact.out) + out_floor(case, dtype) / 0.7
    assert largest_error(out, exact.out) <= allowed
    torch.testing.assert_close(lse, exact.lse.float(), rtol=1e-2, atol=1e-2)

    seen = mask != 0.0
    dropped, count = int((mask < 0.0).sum()), int(seen.sum())
    assert abs(dropped - 0.3 * count) < 6.0 * math.sqrt(0.3 * 0.7 * count)
    torch.manual_seed(0)
    assert torch.equal(out, call.function(**arguments)[0])
    torch.manual_seed(1)
    assert not torch.equal(out, call.function(**arguments)[0])


def test_every_named_case_exists() -> None:
    assert len(DROPOUT_CASES) == len(NAMES)
