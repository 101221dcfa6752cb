"""What every kernel promises of every call of the indexer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from fastattention.engine.operator import request_of
from fastattention.indexer import fast_indexer_func
from fastattention.indexer.backend import IndexerBackend
from fastattention.indexer.problem import IndexerInputs, IndexerProblem
from fastattention.indexer.reference import index
from fastattention.indexer.validation import prepare
from fastattention.testing.indexer import IndexerCase, fault_of
from fastattention.testing.memory import bits, nan_in_fresh_memory, whole_memory


def run(backend: IndexerBackend, arguments: Mapping[str, Any]) -> tuple[IndexerProblem, IndexerInputs, Tensor]:
    """A call, and its indices (total_q, topk). Skips a call that the backend refuses."""
    _, given, options, _, returned = request_of(fast_indexer_func, **arguments)
    problem, inputs = prepare(given, options)
    if (reason := backend.why_not(problem)) is not None:
        pytest.skip(f"{backend.name}: {reason}")
    tensors = [x for x in arguments.values() if isinstance(x, Tensor)]
    before = [bits(whole_memory(x)).clone() for x in tensors]
    serve = backend.make_call(problem, inputs)
    if problem.device.type == "cpu":
        with nan_in_fresh_memory():
            output = serve(inputs)
    else:
        output = serve(inputs)  # torch refuses its products there
    assert returned(output).shape == (*arguments["q"].shape[:-2], arguments["topk"])
    assert all(torch.equal(bits(whole_memory(x)), y) for x, y in zip(tensors, before, strict=True))
    return problem, inputs, output.indices


def check(backend: IndexerBackend, case: IndexerCase, dtype: torch.dtype, device: str = "cpu") -> None:
    """Indices are right, no tensor of the call is written, and the next call gives the same."""
    problem, inputs, indices = run(backend, case.arguments(dtype, device))
    assert (fault := fault_of(problem, inputs, indices)) is None, fault
    assert torch.equal(run(backend, case.arguments(dtype, device))[2], indices)


def check_exact(backend: IndexerBackend, arguments: Mapping[str, Any]) -> None:
    """Indices are those of the reference, for a call whose scores no rounding changes."""
    problem, inputs, indices = run(backend, arguments)
    assert torch.equal(indices, index(problem, inputs).indices)


def check_special_scores(backend: IndexerBackend, dtype: torch.dtype, device: str = "cpu") -> None:
    """NaN counts as the greatest score, and infinities as what they are; of equal ones the first keys win."""
    values = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 2.0, 3.5, -5.0])
    drawn = torch.randint(len(values), (1100,), generator=torch.Generator().manual_seed(0))
    for topk in (1, 100, 130, 300, 400, 600, 800, 1000, 1099):
        check_exact(backend, {**with_scores(values[drawn], dtype, device), "topk": topk})


def with_scores(scores: Tensor, dtype: torch.dtype, device: str = "cpu") -> dict[str, Any]:
    """Arguments whose scores are these: heads of 1 and -1 give max(k, 0) and max(-k, 0), and weights subtract them."""
    signs = torch.tensor([1.0, -1.0], device=device)
    return {
        "q": signs.to(dtype).view(1, 1, 2, 1),
        "k": scores.to(device, dtype).view(1, -1, 1),
        "weights": signs.view(1, 1, 2),
        "causal": False,
    }


def check_zeros(backend: IndexerBackend, dtype: torch.dtype, nheads: int, device: str = "cpu") -> None:
    """A score that underflows from below 0 is 0, like others: the first keys win."""
    k = torch.zeros(1, 70, 1, dtype=dtype, device=device)
    k[:, ::2] = 2.0**-20  # times weights less than any number
    q = torch.ones(1, 1, nheads, 1, dtype=dtype, device=device)
    weights = torch.full((1, 1, nheads), -(2.0**-140), device=device)
    _, _, indices = run(backend, {"q": q, "k": k, "weights": weights, "topk": 5})
    assert indices.tolist() == [[0, 1, 2, 3, 4]]
