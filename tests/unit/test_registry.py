"""Which backend serves a call."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fastattention import ArgumentError, UnsupportedError, fast_attn_func
from fastattention.backends import registry
from fastattention.backends.base import Backend
from fastattention.problem import Problem
from fastattention.validation import Options, prepare_dense
from unit.fakes import Absent, Picky, Willing

RegisterBackends = Callable[..., None]


def qkv(headdim: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(1, 3, 2, headdim)
    return q, q.clone(), q.clone()


def problem_of(headdim: int = 8) -> Problem:
    problem, _ = prepare_dense(*qkv(headdim), Options())
    return problem


def test_the_order_goes_from_special_to_general() -> None:
    assert list(registry.ORDER) == ["cuda", "ascend", "cpu", "sdpa"]


@pytest.mark.parametrize("name", list(registry.ORDER))
def test_every_registered_backend_exists_under_its_name(name: str) -> None:
    backend = registry.get_backend(name)
    assert isinstance(backend, Backend)
    assert backend.name == name
    assert backend is registry.get_backend(name)
    if backend.why_unavailable() is None:
        assert "\n" not in backend.describe()


def test_auto_takes_the_first_that_can(only_backends: RegisterBackends) -> None:
    only_backends(Absent, Picky, Willing)
    assert isinstance(registry.select_backend(problem_of(64)), Picky)
    assert type(registry.select_backend(problem_of(8))) is Willing


def test_a_name_is_the_only_backend_considered(only_backends: RegisterBackends) -> None:
    only_backends(Willing, Picky)
    assert isinstance(registry.select_backend(problem_of(64), "picky"), Picky)
    with pytest.raises(UnsupportedError) as raised:
        registry.select_backend(problem_of(8), "picky")
    assert "picky: headdim=8 is not supported by picky; use 64" in str(raised.value)
    assert "willing" not in str(raised.value)


def test_an_error_lists_every_reason(only_backends: RegisterBackends) -> None:
    only_backends(Absent, Picky)
    with pytest.raises(UnsupportedError) as raised:
        fast_attn_func(*qkv())
    assert isinstance(raised.value, NotImplementedError)
    assert "absent: needs a device called moon; there is none" in str(raised.value)
    assert "picky: headdim=8 is not supported by picky; use 64" in str(raised.value)


def test_verdicts_are_in_order_with_their_reasons(only_backends: RegisterBackends) -> None:
    only_backends(Willing, Absent, Picky)
    assert [(name, reason) for name, reason, _ in registry.verdicts(problem_of(64))] == [
        ("willing", None),
        ("absent", "needs a device called moon; there is none"),
        ("picky", None),
    ]


def test_an_unknown_name_is_refused_with_the_known_ones(only_backends: RegisterBackends) -> None:
    only_backends(Absent, Willing)
    with pytest.raises(ArgumentError, match="backend='sdpa' is not known; choose 'auto' or one of 'absent', 'willing'"):
        fast_attn_func(*qkv(), backend="sdpa")


def test_the_chosen_backend_gets_the_problem_and_the_tensors(only_backends: RegisterBackends) -> None:
    only_backends(Willing)
    Willing.served.clear()
    q, k, v = qkv()
    fast_attn_func(q, k, v, causal=True)
    problem, inputs = Willing.served.pop()
    assert problem.is_causal
    assert inputs.q is q
    assert inputs.k is k
    assert inputs.v is v
