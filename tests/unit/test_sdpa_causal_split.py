"""Causal calls with more keys than queries are split in two, where cuDNN's kernel has only square masks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from conformance.check import assert_small_errors
from torch.nn.attention import SDPBackend, sdpa_kernel

from fastattention.attention.problem import AttentionOutput, Inputs, Problem
from fastattention.backends.sdpa import causal_split
from fastattention.backends.sdpa.backend import SdpaBackend
from fastattention.testing.calls import build_call
from fastattention.testing.case import Bias, Case, DenseCase, KvCacheCase
from fastattention.testing.oracle import expected
from unit.test_sdpa_gpu_kernels import LOWER_RIGHT, REFUSED

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LONG = replace(LOWER_RIGHT, seqlen_q=600, total_q=1200, seqlen_k=1000, return_lse=False)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Problem]]:
    """The problems that the sdpa backend serves, where cuDNN seems to serve every square of any size."""
    problems: list[Problem] = []
    forward = SdpaBackend.forward

    def noted(self: SdpaBackend, problem: Problem, inputs: Inputs) -> AttentionOutput:
        problems.append(problem)
        return forward(self, problem, inputs)

    monkeypatch.setattr(causal_split, "_LEAST_QUERIES", 2)
    monkeypatch.setattr(causal_split, "divide", lambda problem: causal_split._divide(problem))
    monkeypatch.setattr(SdpaBackend, "forward", noted)
    causal_split._divide.cache_clear()
    yield problems
    causal_split._divide.cache_clear()


def attend(case: Case, dtype: torch.dtype) -> AttentionOutput:
    problem, inputs = build_call(case, dtype).prepare()
    return SdpaBackend().forward(problem, inputs)


def dense(name: str, **case: Any) -> DenseCase:
    return DenseCase(name=name, **{"batch_size": 2, "seqlen_q": 11, "seqlen_k": 40, "causal": True} | case)


IN_TWO = [
    dense("plain"),
    dense("one-key-before", seqlen_k=12),
    dense("two-queries", seqlen_q=2),
    dense("gqa", nheads=6, nheads_k=2),
    dense("values-wider", headdim=24, headdim_v=56),
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
    dense("softcap", softcap=3.0),
    dense("sinks", sinks=True),
    dense("bias", bias=Bias("bhqk")),
    dense("alibi", alibi="per_head"),
    KvCacheCase(name="cache", cache_seqlens=(40, 17), seqlen_q=9, causal=True),
]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.parametrize("case", IN_TWO, ids=lambda case: case.name)
def test_two_calls_give_the_whole(case: DenseCase, dtype: torch.dtype, served: list[Problem]) -> None:
    result = attend(case, dtype)
    assert_small_errors(expected(case, dtype), {"out": result.out})
    whole, rectangle, square = served
    if whole.return_lse:
        assert_small_errors(expected(case, dtype), {"lse": result.lse})
    assert (rectangle.window_right, rectangle.seqlen_k) == (-1, case.seqlen_k - case.seqlen_q)
    assert square.is_causal
    assert square.seqlen_k == square.seqlen_q == case.seqlen_q


@pytest.mark.parametrize("case", AT_ONCE, ids=lambda case: case.name)
def test_calls_that_are_no_corner_or_would_not_merge_are_made_at_once(case: Case, served: list[Problem]) -> None:
    assert_small_errors(expected(case, torch.float32), {"out": attend(case, torch.float32).out})
    assert len(served) == 1


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("changes", REFUSED[1:], ids=str)
def test_only_calls_that_cudnn_serves_are_divided(changes: dict[str, Any]) -> None:
    assert causal_split.divide(LONG) is not None
    assert causal_split.divide(replace(LONG, **changes)) is None


@pytest.mark.usefixtures("hopper")
def test_few_queries_and_other_kernels_are_one_call() -> None:
    assert causal_split.divide(replace(LONG, seqlen_q=511)) is None
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        assert causal_split.divide(LONG) is None
    assert causal_split.divide(LONG) is not None
