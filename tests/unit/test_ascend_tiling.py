"""Chosen tilings fit every chip; those that do not fit are refused with the buffer's name."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiers import deep, sampled, slow

from fastattention.attention.problem import Layout, Problem
from fastattention.backends.ascend import tiling as tilings
from fastattention.backends.ascend.chips import CHIPS, Chip
from fastattention.backends.ascend.mask_tile import MASK_TILE
from fastattention.backends.ascend.simulator.whole_chip import estimate_cycles, predict
from fastattention.backends.ascend.simulator.workload import SimulatedCall
from fastattention.backends.ascend.tiling import Tiling, choose_tiling, compiler_options, tiling_for, why_not_fit
from unit.samples import problem_of

CHIP = CHIPS["910B2"]
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
GOOD = Tiling(outer_tile_m=128, outer_tile_n=256, inner_tile_m=16, preload=2, multibuffer=True)


def make_problem(seqlen_q: int, seqlen_k: int, **changes: Any) -> Problem:
    return problem_of(device=torch.device("cpu"), seqlen_q=seqlen_q, seqlen_k=seqlen_k, **changes)


# Cores of all chips have the same buffers, so the chips take turns: 45 cases, five of each chip.
CASES = zip(
    itertools.product((16, 32, 64, 128, 256), DTYPES, ((1, 4096), (7, 100), (4096, 4096))),
    itertools.cycle(CHIPS.values()),
    strict=False,
)


@sampled
@pytest.mark.parametrize(
    ("headdim", "dtype", "lengths", "chip"),
    [(*case, chip) for case, chip in CASES],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_chosen_tiling_fits(headdim: int, dtype: torch.dtype, lengths: tuple[int, int], chip: Chip) -> None:
    chosen = choose_tiling(make_problem(*lengths, headdim=headdim, dtype=dtype), chip)
    assert why_not_fit(chosen, headdim, headdim, dtype, chip) is None


@pytest.mark.parametrize("headdim", [16, 128, 256])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 4096), (7, 100), (512, 4096)], ids=["decode", "short", "long"])
def test_an_int8_cache_gets_a_tiling_with_room_to_convert_it(headdim: int, seqlen_q: int, seqlen_k: int) -> None:
    problem = replace(make_problem(seqlen_q, seqlen_k, headdim=headdim), cache_dtype=torch.int8)
    chosen = choose_tiling(problem, CHIP)
    assert why_not_fit(chosen, headdim, headdim, torch.float16, CHIP, int8_cache=True) is None


def test_what_converting_an_int8_cache_takes_counts() -> None:
    """512 keys of 128 elements, half for each Vector unit: int8, float16 and an intermediate in float32."""
    tiling = Tiling(outer_tile_m=16, outer_tile_n=512, inner_tile_m=2, preload=1, multibuffer=False)
    assert why_not_fit(tiling, 128, 128, torch.float16, CHIP) is None
    reason = why_not_fit(tiling, 128, 128, torch.float16, CHIP, int8_cache=True) or ""
    assert reason.startswith("UB would hold")
    assert f"int8 keys or values {512 * 128 // 2 * (1 + 2 + 4)}" in reason


@pytest.mark.parametrize(("headdim", "headdim_v"), [(1, 1), (40, 256), (256, 8), (192, 128), (129, 129)])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_odd_and_unequal_head_dimensions_get_a_tiling_that_fits(headdim: int, headdim_v: int, causal: bool) -> None:
    chosen = choose_tiling(
        make_problem(300, 777, headdim=headdim, headdim_v=headdim_v, window_right=0 if causal else -1), CHIP
    )
    assert why_not_fit(chosen, headdim, headdim_v, torch.float16, CHIP) is None


@pytest.mark.parametrize(
    ("capacity", "buffer", "used", "allowed"),
    [
        ("l0a_bytes", "L0A", 2 * 128 * 16 * 2, 8191),
        ("l0b_bytes", "L0B", 2 * 128 * 16 * 2, 1000),
        ("l0c_bytes", "L0C", 128 * 128 * 4, 16000),  # a whole product with values
        # Queries 32 KB, two tiles of keys and two of values of 64 KB each, weights 64 KB.
        ("l1_bytes", "L1", (32 + 128 + 128 + 64) * 1024, 200_000),
        # Two slices of scores of 16 KB, weights 8 KB, mask 4 KB; one of intermediates; O and a product of 32 KB each;
        # statistics.
        ("ub_bytes", "UB", (32 + 16 + 8 + 16 + 32 + 32) * 1024 + 3 * 64 * 4, 130_000),
    ],
    ids=["L0A", "L0B", "L0C", "L1", "UB"],
)
def test_tiling_that_is_too_large_is_refused_naming_buffer_and_bytes(
    capacity: str, buffer: str, used: int, allowed: int
) -> None:
    small = replace(CHIP, **{capacity: allowed})
    reason = why_not_fit(GOOD, 128, 128, torch.float16, small)
    assert reason.startswith(f"{buffer} would hold {used} bytes (")
    assert reason.endswith(f"910B2 allows {allowed}")
    exact = replace(CHIP, **{capacity: used})
    fits = why_not_fit(GOOD, 128, 128, torch.float16, exact)
    assert fits is None or not fits.startswith(buffer)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("outer_tile_m", 96, "outer_tile_m=96 is not possible; use a power of two from 16 on"),
        ("outer_tile_n", 8, "outer_tile_n=8 is not possible; use a power of two from 16 on"),
        ("inner_tile_m", 65, "inner_tile_m=65 is not possible; use 1 to 64"),
        ("inner_tile_m", 0, "inner_tile_m=0 is not possible; use 1 to 64"),
        ("preload", 0, "preload=0 is not possible; use 1 or more"),
        ("outer_tile_n", 2048, "outer_tile_m=128 and outer_tile_n=2048 exceed the mask tile: their sum may be 2048"),
        ("inner_tile_m", 64, "UB would hold"),
    ],
)
def test_impossible_tiling_is_refused(field: str, value: int, reason: str) -> None:
    given = why_not_fit(replace(GOOD, **{field: value}), 128, 128, torch.float16, CHIP)
    assert given.startswith(reason)


def test_single_buffers_take_less() -> None:
    unified = Tiling(128, 256, 32, preload=1, multibuffer=False)
    assert why_not_fit(unified, 128, 128, torch.float16, CHIP) is None
    assert "UB" in (why_not_fit(replace(unified, multibuffer=True), 128, 128, torch.float16, CHIP) or "")


@pytest.mark.parametrize(
    ("tiling", "buffer"),
    [
        (replace(GOOD, inner_tile_m=32, outer_tile_n=256), "UB"),  # a slice of intermediates
        (replace(GOOD, outer_tile_n=512, inner_tile_m=8), "L1"),  # whole tiles of keys and values
    ],
    ids=["UB", "L1"],
)
def test_a_kernel_written_by_hand_needs_less(tiling: Tiling, buffer: str) -> None:
    assert (why_not_fit(tiling, 128, 128, torch.float16, CHIP) or "").startswith(buffer)
    assert why_not_fit(tiling, 128, 128, torch.float16, CHIP, by_hand=True) is None


@pytest.mark.parametrize(("page_block_size", "most"), [(16, 16), (48, 64), (128, 128), (1000, 1024)])
@pytest.mark.parametrize("seqlen_q", [1, 512], ids=["decode", "prefill"])
def test_no_tile_of_keys_exceeds_a_page(page_block_size: int, most: int, seqlen_q: int) -> None:
    pages = {"layout": Layout.KVCACHE, "page_block_size": page_block_size}
    assert 16 <= choose_tiling(make_problem(seqlen_q, 4096, **pages), CHIP).outer_tile_n <= most


@pytest.mark.parametrize(("nheads", "nheads_k", "rows"), [(8, 8, 16), (32, 8, 16), (64, 1, 64)])
def test_rows_of_a_decode_are_the_heads_that_share_keys(nheads: int, nheads_k: int, rows: int) -> None:
    assert choose_tiling(make_problem(1, 8192, nheads=nheads, nheads_k=nheads_k), CHIP).outer_tile_m <= rows


def test_windows_of_every_chosen_tiling_lie_in_the_mask_tile() -> None:
    for seqlen in (16, 500, 4096):
        chosen = choose_tiling(make_problem(seqlen, seqlen, window_right=0), CHIP)
        assert chosen.outer_tile_m + chosen.outer_tile_n <= MASK_TILE


WORKLOADS = {
    "1K": SimulatedCall(1, 1024, 1024, 1, 1, 128, 128, torch.float16),
    "8K": SimulatedCall(1, 8192, 8192, 1, 1, 128, 128, torch.float16),
    "causal": SimulatedCall(1, 4096, 4096, 12, 12, 128, 128, torch.float16, window_right=0),
    "float32": SimulatedCall(1, 2048, 2048, 8, 8, 256, 256, torch.float32),
    "headdim 64": SimulatedCall(2, 2048, 2048, 16, 4, 64, 64, torch.bfloat16),
    "decode": SimulatedCall(4, 1, 8192, 32, 8, 128, 128, torch.float16),
    "short": SimulatedCall(1, 300, 300, 16, 16, 16, 16, torch.float16),
}
QUICK = ("1K", "headdim 64", "decode", "short")  # simulated in a second or two, with every tiling


@pytest.mark.parametrize(
    "workload", [pytest.param(call, id=name, marks=() if name in QUICK else deep) for name, call in WORKLOADS.items()]
)
def test_chosen_tiling_is_among_the_fastest_by_the_whole_simulator(workload: SimulatedCall) -> None:
    fitting = tilings._candidates(workload, CHIP, tilings.LONGEST)
    fastest = min(predict(workload, tiling, CHIP).seconds for tiling in fitting)
    assert predict(workload, tiling_for(workload, CHIP), CHIP).seconds <= 1.03 * fastest


@slow
@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=list(WORKLOADS))
def test_estimate_stays_near_the_simulation(workload: SimulatedCall) -> None:
    for tiling in tilings._candidates(workload, CHIP, tilings.LONGEST):
        simulated = predict(workload, tiling, CHIP).seconds * CHIP.clock_hz
        assert estimate_cycles(workload, tiling, CHIP) == pytest.approx(simulated, rel=0.25)


def test_choice_is_made_once() -> None:
    problem = make_problem(640, 640)
    assert choose_tiling(problem, CHIP) is choose_tiling(problem, CHIP)
    # Similar lengths share a choice, so it need not be made again for every prompt.
    before = tilings._fastest.cache_info().misses
    for seqlen in range(3000, 3050):
        choose_tiling(make_problem(seqlen, seqlen), CHIP)
    assert tilings._fastest.cache_info().misses <= before + 1


def test_problem_of_no_tokens_gets_a_tiling() -> None:
    assert why_not_fit(choose_tiling(make_problem(0, 0), CHIP), 128, 128, torch.float16, CHIP) is None


def test_compiler_is_told_the_slices_of_both_units() -> None:
    assert compiler_options(GOOD, CHIP) == {
        "multibuffer": True,
        "limit_auto_multi_buffer_only_for_local_buffer": False,
        "enable_auto_bind_sub_block": True,
        "tile_mix_vector_loop": 4,
        "tile_mix_cube_loop": 2,
        "set_workspace_multibuffer": 2,
    }
    assert "set_workspace_multibuffer" not in compiler_options(replace(GOOD, preload=1), CHIP)


@pytest.mark.parametrize("seqlen", [16, 100, 1000, 10000])
def test_compiler_options_are_those_that_exist(seqlen: int) -> None:
    options = compiler_options(choose_tiling(make_problem(seqlen, seqlen), CHIP), CHIP)
    assert options["tile_mix_vector_loop"] in (1, 2, 4, 8)
    assert options["tile_mix_cube_loop"] in (1, 2, 4, 8)
    assert options.get("set_workspace_multibuffer", 2) in (2, 4)
