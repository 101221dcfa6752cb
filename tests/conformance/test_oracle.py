"""The tolerance notices mistakes: every mistake a backend has made, or might, fails the comparison.

Here the reference makes them, on a changed call, and the same comparison as for a backend must fail.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from conformance.cases import CASES
from conformance.check import assert_small_errors
from fastattention.attention.problem import Inputs, Problem
from fastattention.attention.reference import reference_attention
from fastattention.testing.calls import build_call
from fastattention.testing.case import Case
from fastattention.testing.memory import guarded, whole_memory
from fastattention.testing.oracle import expected, largest_error

Mistake = Callable[[Problem, Inputs], tuple[Problem, Inputs]]


def wrong_problem(**fields: Any) -> Mistake:
    return lambda problem, inputs: (replace(problem, **fields), inputs)


def wrong_inputs(name: str, change: Callable[[Tensor], Tensor | None]) -> Mistake:
    return lambda problem, inputs: (problem, inputs._replace(**{name: change(getattr(inputs, name))}))  # type: ignore[arg-type]


def wrong_rotary(problem: Problem, inputs: Inputs) -> tuple[Problem, Inputs]:
    assert inputs.rotary_cos is not None
    assert inputs.rotary_sin is not None
    return problem, inputs._replace(rotary_cos=inputs.rotary_cos.roll(1, 0), rotary_sin=inputs.rotary_sin.roll(1, 0))


MISTAKES: dict[str, tuple[str, Mistake]] = {
    "mask one key too far right": ("causal-65x63", wrong_problem(window_right=1)),
    "not causal": ("varlen-causal", wrong_problem(window_right=-1)),
    "window one key too wide": ("window-7-3-75x75", wrong_problem(window_left=8)),
    "window one key too narrow": ("window-7-3-75x75", wrong_problem(window_right=2)),
    "scale": ("softmax-scale", wrong_problem(softmax_scale=0.45)),
    "no softcap": ("softcap", wrong_problem(softcap=0.0)),
    "no sinks": ("sinks", wrong_inputs("sinks", lambda sinks: None)),
    "sinks of other heads": ("sinks", wrong_inputs("sinks", lambda sinks: sinks.flip(0))),
    "no alibi": ("alibi-causal", wrong_inputs("alibi_slopes", lambda slopes: None)),
    "alibi of one sequence for all": ("alibi-per-sequence", wrong_inputs("alibi_slopes", lambda slopes: slopes[0])),
    "no bias": ("bias-bhqk-hides-nothing", wrong_inputs("attn_bias", lambda bias: None)),
    "bias of other heads": ("bias-1h11-hides-nothing", wrong_inputs("attn_bias", lambda bias: bias.flip(1))),
    "heads grouped wrongly": ("heads-8-of-2", wrong_inputs("k", lambda k: k.flip(2))),
    "no left padding": ("leftpad", wrong_inputs("cache_leftpad", lambda leftpad: None)),
    "one token too much padding": ("leftpad", wrong_inputs("cache_leftpad", lambda leftpad: leftpad + 1)),
    "one token too few": (
        "cache-seqlen-q-5",
        wrong_inputs("cache_seqlens", lambda lengths: (lengths - 1).clamp(min=0)),
    ),
    "one token too many": ("cache-seqlen-q-5", wrong_inputs("cache_seqlens", lambda lengths: lengths + 1)),
    "other rows of the cache": ("batch-idx", wrong_inputs("cache_batch_idx", lambda rows: rows.flip(0))),
    "other pages": ("pages-64-seqlen-q-1", wrong_inputs("block_table", lambda table: table.roll(1, 0).clamp(max=3))),
    "key scales of other tokens": ("int8-headdim-128-128", wrong_inputs("k_scale", lambda scale: scale.roll(1, 1))),
    "value scales of other heads": ("float8-seqlen-q-5", wrong_inputs("v_scale", lambda scale: scale.flip(2))),
    "no key scales": ("int8-seqlen-q-5", wrong_inputs("k_scale", lambda scale: scale.isfinite().float() / 127)),
    "rotary pairs": ("rotary-halves-16-of-40-causal", wrong_problem(rotary_interleaved=True)),
    "rotary position": ("rotary-halves-16-of-40-causal", wrong_rotary),
    "queries rotated by one position": ("rotary-halves-16-of-40-causal", wrong_problem(window_right=-1)),
}


@pytest.mark.parametrize(("name", "mistake"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_noticed(name: str, mistake: Mistake) -> None:
    case = case_named(name)
    problem, inputs = build_call(case, torch.bfloat16).prepare()
    out, lse, _ = reference_attention(*mistake(problem, inputs), compute_dtype=torch.float32)
    assert lse is not None
    with pytest.raises(AssertionError, match="is off by"):
        assert_matches(case, out, lse)


@pytest.mark.parametrize("name", sorted({name for name, _ in MISTAKES.values()}))
def test_without_a_mistake_nothing_is_noticed(name: str) -> None:
    case = case_named(name)
    out, lse, _ = reference_attention(*build_call(case, torch.bfloat16).prepare(), compute_dtype=torch.float32)
    assert lse is not None
    assert_matches(case, out, lse)


def test_nan_is_the_largest_error() -> None:
    assert largest_error(torch.tensor([1.0, torch.nan]), torch.tensor([1.0, 2.0]).double()) == torch.inf


def test_lse_must_be_minus_infinity_exactly_where_there_are_no_keys() -> None:
    case = case_named("causal-5x2")
    _, lse, _ = reference_attention(*build_call(case, torch.float32).prepare(), compute_dtype=torch.float32)
    assert lse is not None
    wanted = expected(case, torch.float32)
    assert wanted.errors({"lse": lse})["lse"].is_small
    for wrong in (lse.clamp(min=-1e30), torch.full_like(lse, -torch.inf)):
        assert wanted.errors({"lse": wrong})["lse"].error == torch.inf


def assert_matches(case: Case, out: Tensor, lse: Tensor) -> None:
    assert_small_errors(expected(case, torch.bfloat16), {"out": out.to(torch.bfloat16), "lse": lse})


def case_named(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


@pytest.mark.parametrize("offset", [0, 3])
@pytest.mark.parametrize(
    "tensor", [torch.ones(2, 3, 4).transpose(1, 2), torch.ones(2, 3, 4)[..., 1:3]], ids=["transposed", "gaps"]
)
def test_a_guarded_copy_has_the_strides_and_nan_everywhere_else(tensor: Tensor, offset: int) -> None:
    copy = guarded(tensor, offset)
    assert torch.equal(copy, tensor)
    assert copy.stride() == tensor.stride()
    assert copy.data_ptr() % 64 == 4 * offset
    memory = whole_memory(copy)
    assert int(memory.isnan().sum()) == memory.numel() - tensor.numel()
    assert memory[: copy.storage_offset()].numel() >= 256
    assert memory[-256:].isnan().all()
