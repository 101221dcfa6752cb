"""The list of cases on our kernels: lowered by Triton-Ascend, compiled by LLVM, run on the processor."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import hypothesis
import pytest
import torch
from conformance import strategies
from conformance.cases import CASES
from conformance.check import check
from conformance.rows_behind import check_rows_behind
from hypothesis import given
from hypothesis.strategies import SearchStrategy
from tiers import covering, tier_of

from ascend.engine import BACKENDS, ExecutedEngine
from fastattention.attention.validation import Options, prepare_dense
from fastattention.backends.ascend.call import MAX_HEADDIM
from fastattention.testing.calls import problem_of
from fastattention.testing.case import Case, KvCacheCase, VarlenCase


class Run(NamedTuple):
    """One test of the list."""

    case: Case
    dtype: torch.dtype

    @property
    def name(self) -> str:
        return f"{self.case.name}-{str(self.dtype).removeprefix('torch.')}"


def refusal(case: Case, dtype: torch.dtype) -> str | None:
    return BACKENDS[dtype]().why_not(problem_of(case, dtype))


# Their tables end with the last page, and some tiles and splits lie past it: only here a read beyond is noticed.
AT_THE_END_OF_THE_TABLE = [
    KvCacheCase(name="pages-fewer-than-splits", cache_seqlens=(20, 5), page_block_size=16, num_splits=16, spare=0),
    KvCacheCase(name="pages-leftpad-all", cache_seqlens=(32, 32), leftpad=(32, 32), page_block_size=16, spare=0),
    KvCacheCase(name="pages-of-empty-sequences", cache_seqlens=(0, 32, 0), page_block_size=16, spare=0),
    KvCacheCase(name="int8-pages-of-empty-sequences", cache_seqlens=(0, 32, 0), page_block_size=16, spare=0, seqlen_q=3,
                causal=True, softcap=3.0, alibi="per_sequence", sinks=True, stored="int8"),
]  # fmt: skip

# Every case in float32, in which rounding hides the least, and in one of the half precisions, which have other tiles.
# Kernels are compiled for each, which takes most of the time.
HALVES = (torch.float16, torch.bfloat16)
RUNS = [
    Run(case, dtype)
    for position, case in enumerate([*CASES, *AT_THE_END_OF_THE_TABLE])
    for dtype in (torch.float32, HALVES[position % 2])
    if refusal(case, dtype) is None
]


EVERY_TIME = ("cache-sinks-splits-bfloat16",)  # a sink counts in one of the splits


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "run" in metafunc.fixturenames:
        runs = covering(tier_of(metafunc.config), RUNS)
        runs += [run for run in RUNS if run.name in EVERY_TIME and run not in runs]
        metafunc.parametrize("run", runs, ids=[run.name for run in runs])


def test_is_right_repeats_and_writes_nothing_else(run: Run) -> None:
    check(ExecutedEngine.of(run.dtype), run.case, run.dtype)


@pytest.mark.parametrize("dtype", BACKENDS, ids=str)
def test_only_what_the_kernels_lack_is_refused(dtype: torch.dtype) -> None:
    """The other tests leave out what is refused."""
    reasons = {case.name: refusal(case, dtype) for case in CASES}
    refused = {name: reason for name, reason in reasons.items() if reason is not None}
    wide = {case.name for case in CASES if max(case.headdim, case.headdim_of_v) > MAX_HEADDIM}
    in_float8 = {case.name for case in CASES if isinstance(case, KvCacheCase) and case.stored == "float8"}
    quantized = {case.name for case in CASES if isinstance(case, VarlenCase) and case.quantized}
    masked = {case.name for case in CASES if case.bias is not None or case.blocks is not None}
    changed = {case.name for case in CASES if case.qk_dtype is not None or case.dropout_p}
    assert refused.keys() == wide | in_float8 | quantized | masked | changed
    words = (
        "float8",
        "quantized pages",
        "attn_bias",
        "block_mask",
        "qk_dtype",
        "dropout_p",
        f"at most {MAX_HEADDIM} is served",
    )
    for reason in refused.values():
        assert any(word in reason for word in words)


@pytest.mark.parametrize("axis", [0, 1, 2], ids=["batch", "token", "head"])
def test_elements_may_lie_further_apart_than_int32_counts(axis: int) -> None:
    """The third sequence, token or head of q, k and v begins 2^31 elements after the first."""
    shape, strides = (3, 3, 3, 16), [9 * 16, 3 * 16, 16, 1]
    strides[axis] = 2**30
    memory = torch.empty(2**31 + 2**12, dtype=torch.float16)  # the system allocates only written pages
    tensors = [torch.randn(shape, generator=torch.Generator().manual_seed(i)).half() for i in range(3)]
    apart = [memory.as_strided(shape, strides, 1024 * i).copy_(tensor) for i, tensor in enumerate(tensors)]
    options = Options(causal=True, return_lse=True)
    backend = BACKENDS[torch.float16]()
    expected = backend.forward(*prepare_dense(*tensors, options))
    assert torch.equal(backend.forward(*prepare_dense(*apart, options)).out, expected.out)


# Nearly every random case needs a kernel of its own, which takes longer to compile than to run.
FEW = hypothesis.settings(max_examples=20, deadline=None, derandomize=True)


def without_bias(cases: SearchStrategy[Any]) -> SearchStrategy[Any]:
    return cases.map(lambda case: replace(case, bias=None))


@FEW
@given(case=without_bias(strategies.dense_cases()), dtype=strategies.DTYPES)
def test_random_dense(case: Case, dtype: torch.dtype) -> None:
    hypothesis.assume(refusal(case, dtype) is None)  # a case that is refused would skip all others
    check(ExecutedEngine.of(dtype), case, dtype)


@FEW
@given(case=without_bias(strategies.varlen_cases()), dtype=strategies.DTYPES)
def test_random_varlen(case: Case, dtype: torch.dtype) -> None:
    hypothesis.assume(refusal(case, dtype) is None)
    check(ExecutedEngine.of(dtype), case, dtype)


@hypothesis.settings(FEW, max_examples=4)
@given(case=without_bias(strategies.kvcache_cases()), dtype=strategies.DTYPES)
def test_random_kvcache(case: Case, dtype: torch.dtype) -> None:
    hypothesis.assume(refusal(case, dtype) is None)
    check(ExecutedEngine.of(dtype), case, dtype)


@pytest.mark.parametrize("longest", [1, 40])
@pytest.mark.parametrize("dtype", BACKENDS, ids=str)
def test_rows_behind_the_last_sequence_see_no_keys(dtype: torch.dtype, longest: int) -> None:
    check_rows_behind(BACKENDS[dtype](), dtype, longest)
