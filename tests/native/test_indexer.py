"""The indexer of the native library, by every instruction set and any number of threads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from indexer.cases import CASES
from indexer.check import check, check_exact, check_special_scores, check_zeros, run
from tiers import sampled

from fastattention import set_num_threads
from fastattention.indexer.backend import INDEXER_BACKENDS
from fastattention.testing.indexer import IndexerCase

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["f32", "bf16", "f16"])
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@sampled
@DTYPES
@every_case
def test_indices_are_right(isa: str, case: IndexerCase, dtype: torch.dtype) -> None:
    check(INDEXER_BACKENDS.get("cpu"), case, dtype)


@sampled
@DTYPES
@every_case
def test_of_equal_scores_the_first_keys_win(isa: str, case: IndexerCase, dtype: torch.dtype) -> None:
    check_exact(INDEXER_BACKENDS.get("cpu"), replace(case, ties=True).arguments(dtype))


@DTYPES
def test_scores_that_are_not_finite_or_zero_are_in_order(isa: str, dtype: torch.dtype) -> None:
    check_special_scores(INDEXER_BACKENDS.get("cpu"), dtype)
    check_zeros(INDEXER_BACKENDS.get("cpu"), dtype, 3)


@DTYPES
def test_results_do_not_depend_on_the_number_of_threads(isa: str, dtype: torch.dtype) -> None:
    case = IndexerCase(seqlens_q=(20, 0, 1, 9), seqlens_k=(3000, 5, 2500, 700), keys="varlen", nheads=4, topk=200)
    found = []
    for num_threads in (1, 2, 16):
        set_num_threads(num_threads)
        try:
            found.append(run(INDEXER_BACKENDS.get("cpu"), case.arguments(dtype))[2])
        finally:
            set_num_threads(None)
    assert all(torch.equal(one, found[0]) for one in found)
