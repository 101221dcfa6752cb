"""Cases whose gradients the vendor's operators compute, and their right results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from conformance.check import assert_small_errors
from conformance.gradients import GRADIENT_CASES, has_gradients
from torch import Tensor

from ascend.vendor.cases import MORE
from fastattention.attention.problem import Inputs, Problem
from fastattention.backends.ascend import vendor
from fastattention.backends.common.gradients import COMPUTED
from fastattention.testing.calls import Call, build_call, problem_of
from fastattention.testing.case import Case, DenseCase, VarlenCase
from fastattention.testing.oracle import Results, expected, present, results_of

Attention = Callable[[Call], Tensor]

ODD: list[Case] = [
    DenseCase(name="gradients-odd", batch_size=3, seqlen_q=37, seqlen_k=51, nheads=6, nheads_k=2, headdim=24),
    DenseCase(name="gradients-rows-without-keys", seqlen_q=53, seqlen_k=17, nheads=6, nheads_k=3, causal=True),
    DenseCase(name="gradients-one-query", seqlen_q=1, seqlen_k=129, nheads=4, nheads_k=1, causal=True),
    DenseCase(name="gradients-scale", seqlen_q=19, seqlen_k=33, softmax_scale=-0.3, window=(8, 3)),
    DenseCase(name="gradients-sinks", batch_size=2, seqlen_q=41, seqlen_k=23, nheads=4, causal=True, sinks=True),
    VarlenCase(name="gradients-ragged", seqlens_q=(1, 40, 0, 3, 65, 17), seqlens_k=(9, 33, 5, 0, 65, 64), nheads=6,
               nheads_k=2, headdim=24),
    VarlenCase(name="gradients-ragged-window", seqlens_q=(40, 7, 33), seqlens_k=(11, 7, 90), window=(9, 2)),
]  # fmt: skip
LIST = [*GRADIENT_CASES, *ODD, *(case for case in MORE if has_gradients(case))]
assert len({case.name for case in LIST}) == len(LIST), "the names of cases are their ids and must differ"


def wanted_of(case: Case) -> tuple[str, ...]:
    """The tensors of a case that have a gradient."""
    return present(case, COMPUTED)


def prepared(case: Case, dtype: torch.dtype) -> tuple[Problem, Inputs]:
    """A case as a call that autograd follows, and that returns out alone."""
    problem, inputs = build_call(case, dtype).prepare()
    return _differentiated(problem, case), inputs


def gradient_runs(*dtypes: torch.dtype) -> Iterator[tuple[Case, torch.dtype]]:
    """Every case whose gradients are served, in each dtype in which they are."""
    return (
        (case, dtype)
        for case in LIST
        for dtype in dtypes
        if vendor.why_not(_differentiated(problem_of(case, dtype), case)) is None
    )


def _differentiated(problem: Problem, case: Case) -> Problem:
    return replace(problem, grads=wanted_of(case), return_lse=False)


def weights_of(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The weights of out in the sum that is differentiated."""
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(1)).to(dtype)


def training_results(case: Case, dtype: torch.dtype, attention: Attention, grads: Sequence[str]) -> Results:
    """out and gradients of a call that returns no lse."""
    return results_of(build_call(case, dtype), lambda call: (attention(call), None), grads)


def check_gradients(case: Case, dtype: torch.dtype, attention: Attention) -> None:
    """Every error is at most twice that of torch in the same precision, both against float64."""
    grads = wanted_of(case)
    found = training_results(case, dtype, attention, grads)
    assert_small_errors(expected(case, dtype, grads, with_lse=False), found)
