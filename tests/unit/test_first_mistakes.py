"""Mistakes of code that comes from another attention library get an error that says what to write here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from typing_extensions import assert_type

import fastattention
from fastattention import (
    ArgumentError,
    explain,
    fast_attn_func,
    fast_attn_qkvpacked_func,
    fast_attn_varlen_func,
    fast_attn_with_kvcache,
)
from fastattention.attention.function import FOREIGN_NAMES
from fastattention.linear import recurrent_gla

Q = torch.zeros(1, 4, 2, 8)
OFFSETS = torch.tensor([0, 4], dtype=torch.int32)

FUNCTIONS: dict[str, Callable[..., object]] = {
    "dense": lambda **wrong: fast_attn_func(Q, Q, Q, **wrong),
    "packed": lambda **wrong: fast_attn_qkvpacked_func(torch.stack([Q, Q, Q], 2), **wrong),
    "varlen": lambda **wrong: fast_attn_varlen_func(Q[0], Q[0], Q[0], OFFSETS, OFFSETS, **wrong),
    "kvcache": lambda **wrong: fast_attn_with_kvcache(Q, Q, Q, **wrong),
    "explain": lambda **wrong: explain(Q, Q, Q, **wrong),
}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_arguments_of_other_libraries_are_answered_by_ours(function: str) -> None:
    for name, advice in FOREIGN_NAMES.items():
        with pytest.raises(TypeError) as raised:
            FUNCTIONS[function](**{name: None})
        assert f"unexpected keyword argument '{name}'" in str(raised.value)
        assert str(raised.value).endswith(advice)


def test_other_type_errors_stay_as_python_writes_them() -> None:
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'attn'$"):
        FUNCTIONS["dense"](attn=None)
    call: Callable[..., object] = fast_attn_func
    with pytest.raises(TypeError, match=r"missing 2 required positional arguments: 'k' and 'v'$"):
        call(Q)


def test_causal_in_the_place_of_dropout_is_recognized() -> None:
    with pytest.raises(ArgumentError, match="dropout_p must be a number below 1, got True; give causal by keyword"):
        fast_attn_func(Q, Q, Q, True)
    assert fast_attn_func(Q, Q, Q, False).shape == Q.shape


def test_completion_lists_public_names_only() -> None:
    names = dir(fastattention)
    assert set(fastattention.__all__) < set(names)
    assert {"errors", "engine", "version"}.isdisjoint(names)
    for name in set(names) - set(fastattention.__all__):
        assert name == "__version__" or __import__(f"fastattention.{name}")


def test_type_checkers_see_what_flags_return() -> None:
    """mypy checks the types; they are those at run time."""
    assert_type(fast_attn_func(Q, Q, Q, causal=True), Tensor)
    pair = assert_type(fast_attn_func(Q, Q, Q, return_lse=True), tuple[Tensor, Tensor])
    triple = assert_type(fast_attn_func(Q, Q, Q, return_attn_probs=True), tuple[Tensor, Tensor, Tensor | None])
    appended = assert_type(fast_attn_with_kvcache(Q, Q, Q, return_softmax_lse=True), tuple[Tensor, Tensor])
    gated = assert_type(recurrent_gla(Q, Q, Q, Q), tuple[Tensor, Tensor | None])
    results: list[tuple[Any, ...]] = [pair, triple, appended, gated]
    assert [len(result) for result in results] == [2, 3, 2, 2]
