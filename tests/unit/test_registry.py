"""The choice of the backend that serves a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fastattention import ArgumentError, UnsupportedError, fast_attn_func, merge_attn_states
from fastattention.attention.backend import ATTENTION_BACKENDS, AttentionBackend
from fastattention.attention.problem import MergeProblem, Problem
from fastattention.attention.validation import Options, prepare_dense
from fastattention.backends.ascend import vendor
from fastattention.backends.ascend.backend import why_not_kernels
from fastattention.backends.cpu.attention.backend import CpuBackend
from fastattention.backends.sdpa.backend import SdpaBackend
from unit.fakes import Absent, Picky, Willing

RegisterBackends = Callable[..., None]


def qkv(headdim: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(1, 3, 2, headdim)
    return q, q.clone(), q.clone()


def problem_of(headdim: int = 8) -> Problem:
    problem, _ = prepare_dense(*qkv(headdim), Options())
    return problem


def test_the_order_goes_from_special_to_general() -> None:
    assert list(ATTENTION_BACKENDS.order) == ["cuda", "ascend", "cpu", "sdpa"]


@pytest.mark.parametrize("name", list(ATTENTION_BACKENDS.order))
def test_every_registered_backend_exists_under_its_name(name: str) -> None:
    backend = ATTENTION_BACKENDS.get(name)
    assert isinstance(backend, AttentionBackend)
    assert backend.name == name
    assert backend is ATTENTION_BACKENDS.get(name)
    if backend.why_unavailable() is None:
        assert "\n" not in backend.describe()


@pytest.mark.parametrize(
    "why_not",
    [CpuBackend().why_not, SdpaBackend().why_not, why_not_kernels, vendor.why_not],
    ids=["cpu", "sdpa", "triton", "vendor"],
)
def test_an_argument_that_a_backend_does_not_list_is_refused_by_name(why_not: Callable[[Problem], str | None]) -> None:
    problem = problem_of(16)
    assert why_not(problem) is None
    assert "does not serve unknown; leave it out" in (why_not(replace(problem, score_tensors=("unknown",))) or "served")


def test_auto_takes_the_first_that_can(only_backends: RegisterBackends) -> None:
    only_backends(Absent, Picky, Willing)
    assert isinstance(ATTENTION_BACKENDS.select(problem_of(64)), Picky)
    assert type(ATTENTION_BACKENDS.select(problem_of(8))) is Willing


def test_a_name_is_the_only_backend_considered(only_backends: RegisterBackends) -> None:
    only_backends(Willing, Picky)
    assert isinstance(ATTENTION_BACKENDS.select(problem_of(64), "picky"), Picky)
    with pytest.raises(UnsupportedError) as raised:
        ATTENTION_BACKENDS.select(problem_of(8), "picky")
    assert "picky: headdim=8 is not supported by picky; use 64" in str(raised.value)
    assert "willing" not in str(raised.value)


def test_an_error_lists_every_reason(only_backends: RegisterBackends) -> None:
    only_backends(Absent, Picky)
    with pytest.raises(UnsupportedError) as raised:
        fast_attn_func(*qkv())
    assert isinstance(raised.value, NotImplementedError)
    assert "absent: needs a device called moon; there is none" in str(raised.value)
    assert "picky: headdim=8 is not supported by picky; use 64" in str(raised.value)


class Swift(Willing):
    name = "swift"

    def why_faster(self, problem: Problem) -> str | None:
        return "it is swift from headdim 32 on" if problem.headdim >= 32 else None


def test_auto_takes_the_first_that_is_faster(only_backends: RegisterBackends) -> None:
    only_backends(Picky, Swift, Willing)
    assert isinstance(ATTENTION_BACKENDS.select(problem_of(64)), Swift)
    assert isinstance(ATTENTION_BACKENDS.select(problem_of(64), "picky"), Picky)
    assert isinstance(ATTENTION_BACKENDS.select(problem_of(8)), Swift)  # the first that can
    only_backends(Willing, Swift)
    assert type(ATTENTION_BACKENDS.select(problem_of(8))) is Willing


def test_verdicts_are_in_order_with_their_reasons(only_backends: RegisterBackends) -> None:
    only_backends(Willing, Absent, Picky)
    assert [(one.backend, one.reason) for one in ATTENTION_BACKENDS.verdicts(problem_of(64))] == [
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


class Merging(Willing):
    """Merges parts in float32, with ones."""

    name = "merging"

    def why_not_merge(self, problem: MergeProblem) -> str | None:
        if problem.needs_grad:
            return "a gradient is needed and there is none"
        return None if problem.dtype is torch.float32 else f"{problem.dtype} is not merged; use float32"

    def merge(self, problem: MergeProblem, outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        assert all(out.stride(-1) == 1 for out in outs)
        return torch.ones(problem.out_shape), torch.ones_like(lses[0])


def test_parts_are_merged_by_the_first_backend_that_can(only_backends: RegisterBackends) -> None:
    outs, lses = torch.zeros(2, 1, 3, 2, 8), torch.zeros(2, 1, 2, 3)
    only_backends(Absent, Merging, Willing)
    assert merge_attn_states(outs, lses)[0].all()
    assert merge_attn_states(outs.transpose(-1, -2), torch.zeros(2, 1, 8, 3))[0].all()
    assert not merge_attn_states(outs.half(), lses)[0].any()
    assert merge_attn_states(outs, lses.requires_grad_())[1].requires_grad
    only_backends(Willing, Merging)
    assert not merge_attn_states(outs, lses.detach())[0].any()


def test_a_merge_that_nobody_serves_is_an_error_with_every_reason(only_backends: RegisterBackends) -> None:
    only_backends(Absent, Merging)
    with pytest.raises(UnsupportedError) as raised:
        merge_attn_states(torch.zeros(2, 1, 3, 2, 8).half(), torch.zeros(2, 1, 2, 3))
    for said in ("no backend can merge these parts", "absent: needs a device", "merging: torch.float16 is not merged"):
        assert said in str(raised.value)


def test_a_merge_that_is_traced_asks_no_backend(only_backends: RegisterBackends) -> None:
    only_backends(Merging)
    outs, lses = torch.zeros(2, 1, 3, 2, 8, device="meta"), torch.zeros(2, 1, 2, 3, device="meta")
    out, lse = merge_attn_states(outs, lses)
    assert (out.shape, lse.shape, out.is_meta) == ((1, 3, 2, 8), (1, 2, 3), True)
