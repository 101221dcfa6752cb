"""The refusals of each backend, with reasons. It must serve everything else, because other tests skip refused calls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from conformance.cases import CASES
from fastattention import UnsupportedError, fast_attn_func, fast_attn_with_kvcache
from fastattention.attention.backend import ATTENTION_BACKENDS
from fastattention.attention.problem import Layout
from fastattention.testing.calls import problem_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_case_is_served(dtype: torch.dtype) -> None:
    for case in CASES:
        problem = problem_of(case, dtype)
        # int8 products need a backend and a processor that have them: test_int8_products.py.
        for backend in ("cpu", "sdpa") if problem.qk_dtype is None else ():
            assert ATTENTION_BACKENDS.get(backend).why_not(problem) is None, f"{case.name} on {backend}"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"dropout_p": 0.1, "return_mask": True}, "dropout"),
        ({"grads": ("q", "attn_bias")}, "attn_bias requires a gradient"),
        ({"grads": ("q",), "in_transform": True}, "torch.func"),
        ({"grads": ("q",), "layout": Layout.VARLEN, "page_block_size": 16}, "pages"),
        ({"grads": ("q",), "layout": Layout.KVCACHE}, "fast_attn_with_kvcache has no backward"),
        ({"device": torch.device("cuda", 0)}, "cuda"),
    ],
    ids=["mask-of-dropout", "gradient-of-a-bias", "transform", "pages", "cache", "other-device"],
)
def test_cpu_refuses_what_it_cannot_do_and_names_it(fields: dict[str, Any], named: str) -> None:
    reason = ATTENTION_BACKENDS.get("cpu").why_not(replace(problem_of(CASES[0], torch.float32), **fields))
    assert reason is not None
    assert named in reason


def test_a_refusal_reaches_the_caller() -> None:
    q = torch.zeros(1, 2, 1, 8)
    slopes = torch.zeros(1, requires_grad=True)
    reason = ATTENTION_BACKENDS.get("cpu").why_not(
        replace(problem_of(CASES[0], torch.float32), grads=("alibi_slopes",))
    )
    assert reason is not None
    with pytest.raises(UnsupportedError) as raised:
        fast_attn_func(q, q, q, alibi_slopes=slopes, backend="cpu")
    assert reason in str(raised.value)


def test_sdpa_refuses_gradients_through_a_cache() -> None:
    q = torch.zeros(1, 2, 1, 8, requires_grad=True)
    cache = torch.zeros(1, 4, 1, 8)
    with pytest.raises(UnsupportedError, match="grad"):
        fast_attn_with_kvcache(q, cache, cache.clone(), backend="sdpa")
