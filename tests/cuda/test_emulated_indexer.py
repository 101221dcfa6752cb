"""The kernels of the indexer, emulated: every code path, division of a call, and the order of CTAs."""

from __future__ import annotations

import itertools
from dataclasses import replace

import emulator
import pytest
import torch
from emulated_indexer import EmulatedIndexer
from indexer.cases import CASES
from indexer.check import check, check_exact, check_special_scores, check_zeros, run
from tiers import covering, sampled, tier_of

from fastattention.backends.cuda.indexer import heuristics
from fastattention.backends.cuda.indexer.config import HEADDIMS, MOST_HEADS
from fastattention.engine.operator import request_of
from fastattention.gpu_runtime.chips import CHIPS
from fastattention.indexer import fast_indexer_func
from fastattention.indexer.problem import IndexerProblem
from fastattention.indexer.validation import prepare
from fastattention.testing.indexer import IndexerCase

PATHS = ("P100", "V100", "T4", "A100")
DTYPES = (torch.float16, torch.bfloat16)
# Each CTA has all keys of its queries, or one tile of them.
SMS = {"one-part": 0, "many-parts": 1000}
SERVED = {name: case for name, case in CASES.items() if 0 < case.nheads <= MOST_HEADS and case.headdim}
SPANNING = CASES["varlen-all-keys"]  # CTAs of 8 queries have those of several sequences


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A kernel takes half a second to compile, so the list is sampled."""
    if {"case", "chip", "parts", "dtype"} <= set(metafunc.fixturenames):
        runs = list(itertools.product(SERVED, (*PATHS, "H100"), SMS, DTYPES))
        chosen = covering(
            tier_of(metafunc.config),
            runs,
            each=lambda run: run[0],
            parameters=lambda run: {"case": CASES[run[0]], "chip": run[1], "parts": run[2], "dtype": run[3]},
        )
        metafunc.parametrize(
            ("case", "chip", "parts", "dtype"),
            [(CASES[name], *others) for name, *others in chosen],
            ids=["-".join([*run[:3], str(run[3]).removeprefix("torch.")]) for run in chosen],
        )


def test_indices_are_right(case: IndexerCase, chip: str, parts: str, dtype: torch.dtype) -> None:
    check(EmulatedIndexer(chip, SMS[parts]), case, dtype)


def test_of_equal_scores_the_first_keys_win(case: IndexerCase, chip: str, parts: str, dtype: torch.dtype) -> None:
    check_exact(EmulatedIndexer(chip, SMS[parts]), replace(case, ties=True).arguments(dtype))


@pytest.mark.parametrize("chip", PATHS)
def test_nan_is_the_greatest_score_and_zeros_are_equal(chip: str) -> None:
    check_special_scores(EmulatedIndexer(chip), torch.float16)
    for nheads in (3, 16):
        check_zeros(EmulatedIndexer(chip), torch.float16, nheads)


@pytest.mark.parametrize(("narrow_keys", "num_warps"), [(1 << 14, 8), (0, 32)], ids=["narrow", "wide"])
def test_ctas_choose_among_more_scores_than_they_read_at_a_time(
    monkeypatch: pytest.MonkeyPatch, narrow_keys: int, num_warps: int
) -> None:
    """A warp has 128 scores at a time, and four times as many are on their way."""
    monkeypatch.setattr(heuristics, "_NARROW_KEYS", narrow_keys)
    seqlen_k = 4 * 128 * num_warps
    case = IndexerCase(seqlens_q=(1, 2), seqlens_k=(seqlen_k + 700, 300), used=True, nheads=1, headdim=1, topk=1500)
    backend = EmulatedIndexer("T4")
    check(backend, case, torch.float16)
    check_exact(backend, replace(case, ties=True).arguments(torch.float16))
    check_special_scores(backend, torch.float16)
    assert {one.variant.entries[0].num_warps for one in backend.launches[1::2]} == {num_warps}


@sampled
@pytest.mark.parametrize("chip", PATHS)
@pytest.mark.parametrize("case", [SPANNING, CASES["varlen-pages"], CASES["used"]], ids=["varlen", "pages", "used"])
def test_a_call_in_several_passes_gives_the_same(monkeypatch: pytest.MonkeyPatch, case: IndexerCase, chip: str) -> None:
    wanted = run(EmulatedIndexer(chip), case.arguments(torch.float16))[2]
    monkeypatch.setattr(heuristics, "_SCORES", 1)  # as many queries at a time as a CTA has
    backend = EmulatedIndexer(chip)
    assert torch.equal(run(backend, case.arguments(torch.float16))[2], wanted)
    assert len(backend.launches) == 2 * -(-len(wanted) // backend.launches[1].num_ctas) > 2


@sampled
@pytest.mark.parametrize("chip", PATHS)
@pytest.mark.parametrize("case", [SPANNING, CASES["pages"], CASES["several-queries"]], ids=["varlen", "pages", "rows"])
def test_results_do_not_depend_on_the_order_of_ctas_and_warps(case: IndexerCase, chip: str) -> None:
    wanted = run(EmulatedIndexer(chip), case.arguments(torch.float16))[2]
    for seed in (1, 2):
        with emulator.shuffled(seed):
            assert torch.equal(run(EmulatedIndexer(chip), case.arguments(torch.float16))[2], wanted)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all-keys"])
@pytest.mark.parametrize("chip", PATHS)
def test_queries_after_the_last_sequence_see_no_keys(monkeypatch: pytest.MonkeyPatch, chip: str, causal: bool) -> None:
    """As in CUDA graphs of batches that vary. A GPU does not check offsets, and must not read beyond its scores."""
    monkeypatch.setattr("fastattention.indexer.validation.are_checked", lambda tensor: False)
    case = IndexerCase(seqlens_q=(1, 299), seqlens_k=(128, 128), keys="varlen", nheads=2, causal=causal, ties=True)
    arguments = case.arguments(torch.float16)
    arguments["cu_seqlens_q"][2] = 3
    check_exact(EmulatedIndexer(chip), arguments)


def test_nothing_is_launched_for_nothing() -> None:
    backend = EmulatedIndexer("A100")
    for name in ("no-query", "no-sequence", "varlen-all-empty", "varlen-nothing"):
        run(backend, CASES[name].arguments(torch.float16))
    assert backend.launches == []


def test_scores_that_no_query_needs_are_not_computed() -> None:
    backend = EmulatedIndexer("A100")
    for name in ("topk-of-all-keys", "topk-above-the-keys", "no-key"):
        check(backend, CASES[name], torch.float16)
    assert {one.variant.source for one in backend.launches} == {"top_keys.cuh"}


@pytest.mark.parametrize(
    ("changes", "dtype", "reason"),
    [
        ({}, torch.float32, "float32 is not served; use float16, bfloat16 or backend='torch'"),
        ({"headdim": 129}, torch.float16, "headdim=129 is not served; use 1 to 128, or backend='torch'"),
        ({"nheads": 0}, torch.float16, "nheads=0 is not served; use 1 to 64, or backend='torch'"),
        ({"nheads": 65}, torch.float16, "nheads=65 is not served; use 1 to 64, or backend='torch'"),
    ],
    ids=["dtype", "headdim", "no-head", "heads"],
)
def test_a_refusal_says_what_to_use(changes: dict[str, int], dtype: torch.dtype, reason: str) -> None:
    _, given, options, *_ = request_of(fast_indexer_func, **IndexerCase(**changes).arguments(dtype))
    assert EmulatedIndexer("A100").why_not(prepare(given, options)[0]) == reason


def problem_of(batch_size: int, seqlen_q: int, seqlen_k: int, nheads: int = 64, headdim: int = 128) -> IndexerProblem:
    return IndexerProblem(
        batch_size * seqlen_q, batch_size, seqlen_q, nheads, headdim, batch_size, seqlen_k, seqlen_k, False, 2048, True,
        torch.bfloat16, torch.device("cuda"), torch.float32,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("problem", "wanted"),
    [
        (problem_of(1, 1, 131072), (1, 1, 256, 32)),
        (problem_of(64, 1, 131072), (1, 64, 4096, 32)),
        (problem_of(32, 2, 8192), (2, 64, 512, 8)),
        (problem_of(8, 4, 8192), (4, 32, 128, 8)),
        (problem_of(1, 4096, 131072), (8, 128, 4096, 32)),
        (problem_of(4, 100, 300), (8, 400, 128, 8)),
        (problem_of(0, 0, 300), (1, 0, 128, 8)),
    ],
    ids=["decode", "many", "two-queries", "four-queries", "prompt", "short", "nothing"],
)
def test_parts_of_keys_keep_multiprocessors_busy(problem: IndexerProblem, wanted: tuple[int, int, int, int]) -> None:
    division = heuristics.choose(problem, 80, CHIPS["H100"])
    assert (division.config.queries, division.rows, division.part_keys, division.top_keys.num_warps) == wanted


@pytest.mark.parametrize("chip", CHIPS)
def test_every_call_gets_kernels_that_fit_its_gpu(chip: str) -> None:
    limits = CHIPS[chip]
    for nheads in range(1, 65):
        for headdim, seqlen_q in ((1, 1), (64, 2), (65, 4), (128, 9)):
            division = heuristics.choose(problem_of(3, seqlen_q, 5000, nheads, headdim), limits.arch, limits)
            assert max(division.config.shared_bytes, division.top_keys.shared_bytes) <= limits.shared_per_cta
            assert nheads <= division.config.head_rows
            assert division.config.pads_heads == (nheads < division.config.head_rows)
            assert division.part_keys % division.config.tile_n == division.stride % division.config.tile_n == 0


@pytest.mark.parametrize("chip", PATHS)
def test_the_list_runs_every_size_of_kernels(chip: str) -> None:
    limits, configs = CHIPS[chip], []
    for case in SERVED.values():
        _, given, options, *_ = request_of(fast_indexer_func, **case.arguments(torch.float16))
        configs.append(heuristics.choose(prepare(given, options)[0], limits.arch, limits).config)
    assert {one.queries for one in configs} == ({1} if limits.arch < 70 else {1, 2, 4, 8})
    assert {one.head_rows for one in configs} == ({32, 64} if limits.arch == 70 else {16, 32, 64})
    assert {one.headdim for one in configs} == set(HEADDIMS)
    assert {(one.pads_heads, one.paged) for one in configs} == set(itertools.product((False, True), repeat=2))
