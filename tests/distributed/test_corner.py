"""Causal blocks in two calls, for backends whose kernels know only squares."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conformance.calls import build_call
from conformance.case import Bias, DenseCase, KvCacheCase
from conformance.oracle import assert_out_matches

from fastattention.backends.sdpa.backend import SdpaBackend
from fastattention.distributed import corner
from fastattention.problem import AttentionOutput, Inputs, Problem

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Problem]:
    """What the sdpa backend is asked for, while it prefers corners whatever the call."""
    problems: list[Problem] = []
    forward = SdpaBackend.forward

    def noted(self: SdpaBackend, problem: Problem, inputs: Inputs) -> AttentionOutput:
        problems.append(problem)
        return forward(self, problem, inputs)

    monkeypatch.setattr(SdpaBackend, "prefers_corner", lambda self, problem: True)
    monkeypatch.setattr(SdpaBackend, "forward", noted)
    return problems


def attend(case: DenseCase | KvCacheCase, dtype: torch.dtype) -> torch.Tensor:
    return corner.attend(*build_call(case, dtype).prepare(), "sdpa")


def dense(name: str, **case: Any) -> DenseCase:
    return DenseCase(name=name, **{"batch_size": 2, "seqlen_q": 11, "seqlen_k": 40, "causal": True} | case)


IN_TWO = [
    dense("plain"),
    dense("one-key-before", seqlen_k=12),
    dense("two-queries", seqlen_q=2),
    dense("gqa", nheads=6, nheads_k=2),
    dense("values-wider", headdim=24, headdim_v=56),
    dense("softcap", softcap=3.0),
    dense("softmax-scale", softmax_scale=-0.3),
    dense("strided", memory_q="sliced_heads", memory_k="heads_major"),
]
AT_ONCE = [
    dense("square", seqlen_k=11),
    dense("more-queries", seqlen_k=5),
    dense("no-keys", seqlen_k=0),
    dense("one-query", seqlen_q=1),
    dense("not-causal", causal=False),
    dense("window", window=(7, -1)),
    dense("sinks", sinks=True),
    dense("bias", bias=Bias("bhqk")),
    dense("alibi", alibi="per_head"),
    KvCacheCase(name="cache", cache_seqlens=(40, 17), seqlen_q=9, causal=True),
]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.parametrize("case", IN_TWO, ids=lambda case: case.name)
def test_two_calls_give_the_whole(case: DenseCase, dtype: torch.dtype, served: list[Problem]) -> None:
    assert_out_matches(case, attend(case, dtype), dtype)
    rectangle, square = served
    assert (rectangle.window_right, rectangle.seqlen_k) == (-1, case.seqlen_k - case.seqlen_q)
    assert square.is_causal
    assert square.seqlen_k == square.seqlen_q == case.seqlen_q


@pytest.mark.parametrize("case", AT_ONCE, ids=lambda case: case.name)
def test_calls_that_are_no_corner_or_would_not_merge_are_made_at_once(
    case: DenseCase | KvCacheCase, served: list[Problem]
) -> None:
    assert_out_matches(case, attend(case, torch.float32), torch.float32)
    assert len(served) == 1


def test_a_backend_that_does_not_prefer_two_calls_gets_one(
    served: list[Problem], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SdpaBackend, "prefers_corner", lambda self, problem: False)
    assert_out_matches(IN_TWO[0], attend(IN_TWO[0], torch.float32), torch.float32)
    assert len(served) == 1
