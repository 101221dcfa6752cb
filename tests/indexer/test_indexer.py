"""The indexer of every backend: indices, ties, scores that are not finite, and memory of bounded size."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiers import sampled

from fastattention.indexer import fast_indexer_func
from fastattention.indexer.backend import INDEXER_BACKENDS
from fastattention.indexer.reference import scores_of_queries
from fastattention.testing.indexer import IndexerCase, fault_of
from indexer.cases import CASES
from indexer.check import check, check_exact, check_special_scores, check_zeros, run

DEVICES = {"cpu": "cpu", "torch": "cpu", **({"cuda": "cuda"} if torch.cuda.is_available() else {})}  # of backends
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["f32", "bf16", "f16"])
every_backend = pytest.mark.parametrize("backend", DEVICES)
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@sampled
@DTYPES
@every_backend
@every_case
def test_indices_are_right(backend: str, case: IndexerCase, dtype: torch.dtype) -> None:
    check(INDEXER_BACKENDS.get(backend), case, dtype, DEVICES[backend])


@sampled
@DTYPES
@every_backend
@every_case
def test_of_equal_scores_the_first_keys_win(backend: str, case: IndexerCase, dtype: torch.dtype) -> None:
    check_exact(INDEXER_BACKENDS.get(backend), replace(case, ties=True).arguments(dtype, DEVICES[backend]))


@sampled
@DTYPES
@every_backend
def test_nan_is_the_greatest_score(backend: str, dtype: torch.dtype) -> None:
    check_special_scores(INDEXER_BACKENDS.get(backend), dtype, DEVICES[backend])


@sampled
@DTYPES
@every_backend
@pytest.mark.parametrize("nheads", [1, 16])
def test_zeros_of_both_signs_are_equal(backend: str, dtype: torch.dtype, nheads: int) -> None:
    check_zeros(INDEXER_BACKENDS.get(backend), dtype, nheads, DEVICES[backend])


@every_backend
def test_hidden_keys_are_never_chosen(backend: str) -> None:
    """Keys that a query sees are chosen even where their scores are -inf, and hidden ones even with NaN are not."""
    device, dtype = DEVICES[backend], torch.float16
    k = torch.full((1, 20, 1), -torch.inf, dtype=dtype, device=device)
    k[:, 18:] = torch.nan
    q = torch.tensor([1.0, -1.0], dtype=dtype, device=device).expand(1, 4, 2)[..., None]
    weights = torch.tensor([1.0, -1.0], device=device).expand(1, 4, 2)
    found = fast_indexer_func(q, k, weights, 3, backend=backend)
    assert found.tolist() == [[[0, 1, 2], [0, 1, 2], [0, 1, 18], [0, 18, 19]]]


def test_the_cpu_backend_scores_more_keys_than_it_has_memory_for() -> None:
    """64 MB hold scores of 32 queries. Queries of both signs want the greatest and the least keys."""
    seqlen_q, seqlen_k, topk = 33, 1 << 19, 50
    k = torch.randn(seqlen_k, generator=torch.Generator().manual_seed(0))
    q = torch.tensor([1.0, -1.0]).repeat(17)[:seqlen_q]
    found = fast_indexer_func(
        q.view(1, -1, 1, 1), k.view(1, -1, 1), torch.ones(1, seqlen_q, 1), topk, causal=False, backend="cpu"
    )
    greatest, least = ((sign * k).topk(topk).indices.sort().values.int() for sign in (1, -1))
    assert torch.equal(found[0], torch.stack([greatest, least]).repeat(17, 1)[:seqlen_q])


def test_the_torch_backend_takes_a_few_queries_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastattention.backends.torch.indexer._PRODUCTS", 2 * 150 * 8)
    for causal in (True, False):
        check(INDEXER_BACKENDS.get("torch"), replace(CASES["varlen"], causal=causal), torch.float32)


WRONG: dict[str, tuple[int, list[int], str]] = {
    "hidden": (5, [0, 1, 2, 3, 4, 6, -1, -1, -1], "query 5 sees 6 keys; its 6 indices must rise from 0 on"),
    "missing": (5, [0, 1, 2, 3, 4, -1, -1, -1, -1], "query 5 sees 6 keys; its 6 indices must rise from 0 on"),
    "too-many": (5, [0, 1, 2, 3, 4, 5, -1, -1, 0], "query 5 sees 6 keys, and after 6 of them there is more than -1"),
    "order": (5, [0, 1, 2, 4, 3, 5, -1, -1, -1], "must rise from 0 on"),
    "twice": (69, [0, 0, 1, 2, 3, 4, 5, 6, 7], "must rise from 0 on"),
    "negative": (69, [-1, 0, 1, 2, 3, 4, 5, 6, 7], "must rise from 0 on"),
    "score": (69, [0, 1, 2, 3, 4, 5, 6, 7, 8], "query 69 has a key whose score is too low by"),
}


@pytest.mark.parametrize(("row", "indices", "says"), WRONG.values(), ids=WRONG)
def test_these_tests_notice_wrong_indices(row: int, indices: list[int], says: str) -> None:
    problem, inputs, found = run(INDEXER_BACKENDS.get("torch"), CASES["prompt"].arguments(torch.float32))
    found[row] = torch.tensor(indices)
    assert says in str(fault_of(problem, inputs, found))


def test_a_key_may_have_a_score_that_is_hardly_less() -> None:
    problem, inputs, found = run(INDEXER_BACKENDS.get("torch"), IndexerCase(seqlen_q=1).arguments(torch.float32))
    scores = dict(scores_of_queries(problem, inputs))[0]
    last, next_best = scores.topk(problem.topk + 1).indices[-2:].tolist()
    found[0] = torch.tensor(sorted({*found[0].tolist(), next_best} - {last}))
    assert "too low" in str(fault_of(problem, inputs, found))
    inputs.k[0, next_best] = inputs.k[0, last] * (1 - 2e-7)
    assert fault_of(problem, inputs, found) is None
