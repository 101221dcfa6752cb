"""The simulator keeps its own rules, its calibration, and the published latencies it is validated on."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastattention.backends.ascend.chips import CHIPS
from fastattention.backends.ascend.mask_tile import mask_tile
from fastattention.backends.ascend.simulator import published, whole_chip
from fastattention.backends.ascend.simulator.calibration import DEFAULT_COSTS, PUBLISHED_STAGES
from fastattention.backends.ascend.simulator.core import Setting
from fastattention.backends.ascend.simulator.events import Event
from fastattention.backends.ascend.simulator.gains import ablation, causes, unified_tiling
from fastattention.backends.ascend.simulator.memory import cached, rate
from fastattention.backends.ascend.simulator.row_block import Run, row_block, simulate
from fastattention.backends.ascend.simulator.standard import StandardKind, predict_standard
from fastattention.backends.ascend.simulator.tiles import Shape, Tiling
from fastattention.backends.ascend.simulator.whole_chip import predict
from fastattention.backends.ascend.simulator.workload import MaskMode, SimulatedCall
from fastattention.backends.ascend.tiling import tiling_for
from fastattention.backends.common.tile_range import TileKind, TileRange

CHIP = CHIPS["910B2"]
TILINGS = {
    "unified": Tiling(128, 128, 64, preload=1, multibuffer=True),
    "measured": published.MEASURED_TILING,
    "large": Tiling(128, 1024, 8, preload=4, multibuffer=True),
    "tall": Tiling(256, 256, 32, preload=2, multibuffer=True),
    "single buffers": Tiling(64, 256, 32, preload=3, multibuffer=False),
    "decode": Tiling(16, 512, 8, preload=2, multibuffer=True),
}
SHAPES = {"128": Shape(128, 128, 2), "256, float32": Shape(256, 256, 4), "64 and 16": Shape(64, 16, 2)}


def setting(tiling: Tiling, shape: Shape = SHAPES["128"]) -> Setting:
    return Setting(CHIP, tiling, shape, cached(CHIP, DEFAULT_COSTS.write_share), DEFAULT_COSTS)


@pytest.fixture(params=[(t, s) for t in TILINGS for s in SHAPES], ids=lambda pair: f"{pair[0]}, {pair[1]}")
def run(request: pytest.FixtureRequest) -> Run:
    tiling, shape = request.param
    return simulate(setting(TILINGS[tiling], SHAPES[shape]), num_tiles=6, num_masked=2)


def by_pipe(events: list[Event]) -> dict[tuple[str, str], list[Event]]:
    pipes = defaultdict(list)
    for event in events:
        pipes[event.unit, event.pipe].append(event)
    return pipes


# Calibration and validation.


def test_stages_are_near_the_published_cycle_counts() -> None:
    residuals = published.residuals()
    assert residuals.keys() == PUBLISHED_STAGES.keys()
    assert all(abs(error) < 0.05 for error in residuals.values()), residuals
    for fitted in ("QK", "softmax"):  # those that have a constant of their own
        assert abs(residuals[fitted]) < 0.01


@pytest.mark.parametrize("validated", published.validate(), ids=lambda one: str(one.seqlen))
def test_whole_kernels_are_near_the_published_latencies(validated: published.Validated) -> None:
    assert abs(validated.error) <= validated.allowed
    assert validated.allowed == (0.15 if validated.seqlen >= 4096 else 0.30)


# Rules of the machine.


def test_no_pipe_does_two_things_at_once(run: Run) -> None:
    pipes = by_pipe(run.events)
    assert len(pipes) == 10
    for events in pipes.values():
        assert all(later.start >= earlier.end for earlier, later in pairwise(events))


def test_nothing_starts_before_what_it_needs(run: Run) -> None:
    assert all(event.start >= event.ready for event in run.events)
    span = defaultdict(list)
    for event in run.events:
        span[event.unit[0], event.pipe, event.stage, event.tile].append(event)

    def first(*key: Any) -> float:
        return min(event.start for event in span[key])

    def last(*key: Any) -> float:
        return max(event.end for event in span[key])

    half = DEFAULT_COSTS.handover / 2
    for tile in range(6):
        assert first("C", "MTE1", "QK", tile) >= min(event.end for event in span["C", "MTE2", "QK", tile])
        assert last("C", "FIX", "QK", tile) >= last("C", "M", "QK", tile)
        # Scores, weights and products pass through memory, each with a flag that is set and waited for.
        assert first("V", "MTE2", "softmax", tile) >= last("C", "FIX", "QK", tile) + 2 * half
        assert first("C", "M", "PV", tile) >= last("V", "MTE3", "softmax", tile) + 2 * half
        assert first("V", "MTE2", "O update", tile) >= last("C", "FIX", "PV", tile) + 2 * half
        assert first("V", "V", "softmax", tile) >= min(event.end for event in span["V", "MTE2", "softmax", tile])
    assert first("V", "MTE3", "result", 5) >= last("V", "V", "O update", 5)


def test_stages_of_the_cube_do_not_overlap(run: Run) -> None:
    stages = defaultdict(list)
    for event in run.events:
        if event.unit == "Cube" and event.pipe in ("MTE1", "M", "FIX"):
            stages[event.stage, event.tile].append(event)
    spans = sorted(
        (min(one.start for one in events), max(one.end for one in events))
        for (stage, _), events in stages.items()
        if stage != "flag"
    )
    assert len(spans) == 12
    assert all(later[0] >= earlier[1] for earlier, later in pairwise(spans))


def test_no_buffer_holds_two_things_in_one_place(run: Run) -> None:
    for buffer in run.buffers:
        slots = defaultdict(list)
        for held in buffer.held:
            assert held.end > held.start, buffer.name
            slots[held.slot].append(held)
        assert 1 <= len(slots) <= buffer.num_slots
        for uses in slots.values():
            assert all(later.start >= earlier.end - 1e-6 for earlier, later in pairwise(uses)), buffer.name


def test_cube_does_all_the_arithmetic_and_no_more() -> None:
    for name, tiling in TILINGS.items():
        result = row_block(setting(tiling), 5)
        macs = 5 * tiling.outer_tile_m * tiling.outer_tile_n * (128 + 128)
        assert result.busy["Cube", "M"] == macs / 16**3, name


def test_what_units_write_is_what_others_read() -> None:
    tiling, result = published.MEASURED_TILING, row_block(setting(published.MEASURED_TILING), 5)
    rows, keys, headdim = tiling.outer_tile_m, tiling.outer_tile_n, 128
    write, read = CHIP.l2_write_rate * DEFAULT_COSTS.write_share, CHIP.l2_read_rate
    flags = DEFAULT_COSTS.handover / 2
    scores_and_products = 5 * (rows * keys * 4 + rows * headdim * 4)
    assert result.busy["Cube", "FIX"] == pytest.approx(scores_and_products / write + 10 * flags)
    assert result.busy["Vector 0", "MTE2"] == pytest.approx(scores_and_products / read)
    weights, out = 5 * rows * keys * 2, rows * headdim * 2
    assert result.busy["Vector 1", "MTE3"] == pytest.approx((weights + out) / write + 5 * flags)
    keys_and_values = 5 * keys * headdim * 2 * 2
    assert result.busy["Cube", "MTE2"] == pytest.approx((rows * headdim * 2 + keys_and_values + weights) / read)


@pytest.mark.parametrize("tiling", TILINGS.values(), ids=list(TILINGS))
def test_reasons_account_for_all_the_time(tiling: Tiling) -> None:
    for num_tiles in (1, 2, 7, 30):
        result = row_block(setting(tiling), num_tiles)
        assert sum(result.spent.values()) == pytest.approx(result.cycles)
        assert min(result.spent.values()) >= 0
        assert max(result.busy.values()) <= result.cycles


@pytest.mark.parametrize("tiling", TILINGS.values(), ids=list(TILINGS))
@pytest.mark.parametrize("masked", ["none", "two", "all"])
def test_long_row_blocks_are_continued_as_they_would_be_simulated(tiling: Tiling, masked: str) -> None:
    num_masked = {"none": 0, "two": 2, "all": 40}[masked]
    whole = simulate(setting(tiling), 40, num_masked).row_block
    continued = row_block(setting(tiling), 40, num_masked)
    assert continued.cycles == pytest.approx(whole.cycles, rel=0.002)
    assert continued.busy == pytest.approx(whole.busy, rel=0.002)


def test_mask_costs_time_where_it_is_applied() -> None:
    events = simulate(setting(published.MEASURED_TILING), num_tiles=5, num_masked=2).events
    cycles: dict[int, float] = defaultdict(float)
    for event in events:
        if (event.unit, event.pipe, event.stage) == ("Vector 0", "V", "softmax"):
            cycles[event.tile] += event.end - event.start
    plain, masked = [cycles[tile] for tile in range(3)], [cycles[tile] for tile in range(3, 5)]
    assert max(plain) < min(masked)


def test_half_masked_row_block_lies_between() -> None:
    none, half, everything = (row_block(setting(TILINGS["unified"]), 40, masked).cycles for masked in (0, 20, 40))
    assert none < half < everything


# The whole chip.


def test_shares_of_a_call_add_up() -> None:
    prediction = predict(published.single_head(4096), published.MEASURED_TILING, CHIP)
    assert sum(prediction.spent.values()) == pytest.approx(1.0)
    assert min(prediction.spent.values()) >= 0.0
    assert prediction.num_row_blocks == 32


def test_cores_without_a_row_block_are_idle() -> None:
    """32 row blocks on 24 cores take as long as 48."""
    short, long = (predict(published.single_head(seqlen), published.MEASURED_TILING, CHIP) for seqlen in (4096, 6144))
    assert short.spent["cores without work"] > 0.25
    one_wave = predict(replace(published.single_head(4096), seqlen_q=3072), published.MEASURED_TILING, CHIP)
    launch = DEFAULT_COSTS.launch / CHIP.clock_hz
    assert short.seconds - launch == pytest.approx(2 * (one_wave.seconds - launch))
    assert long.num_row_blocks == 48


def test_one_row_block_too_many_is_another_wave() -> None:
    two, three = (
        predict(replace(published.single_head(4096), seqlen_q=128 * blocks), published.MEASURED_TILING, CHIP)
        for blocks in (48, 49)
    )
    launch = DEFAULT_COSTS.launch / CHIP.clock_hz
    assert (three.seconds - launch) / (two.seconds - launch) == pytest.approx(1.5)


@pytest.mark.parametrize("tiling", [TILINGS["unified"], TILINGS["large"]], ids=["unified", "two-level"])
def test_longer_takes_longer_and_more_of_anything_is_not_faster(tiling: Tiling) -> None:
    times = [predict(published.single_head(seqlen), tiling, CHIP).seconds for seqlen in (512, 1024, 4096, 16384)]
    assert times == sorted(times)
    base = published.single_head(4096)
    slower = [
        replace(base, nheads=4),
        replace(base, batch_size=4),
        replace(base, headdim=256, headdim_v=256),
        replace(base, dtype=torch.float32),
        replace(base, window_right=0, mask_mode=MaskMode.FULL),
    ]
    assert all(predict(workload, tiling, CHIP).seconds > predict(base, tiling, CHIP).seconds for workload in slower)
    assert predict(base, tiling, CHIP, replace(DEFAULT_COSTS, handover=1000)).seconds > times[2]
    long = published.single_head(16384)
    by_chip = [predict(long, tiling, CHIPS[name]).seconds for name in ("910B1", "910B2", "910B3", "910B4")]
    assert by_chip == sorted(set(by_chip))


def test_nothing_exceeds_the_peak() -> None:
    for dtype in (torch.float16, torch.float32):
        workload = SimulatedCall(1, 16384, 16384, 32, 32, 256, 256, dtype)
        assert 0.3 < predict(workload, tiling_for(workload, CHIP), CHIP).fraction_of_peak < 1.0


def test_scores_of_half_the_size_are_faster() -> None:
    workload = published.single_head(8192)
    half = replace(workload, score_bytes=2)
    assert predict(half, TILINGS["large"], CHIP).seconds < predict(workload, TILINGS["large"], CHIP).seconds


def test_heads_that_share_keys_are_not_slower() -> None:
    own = SimulatedCall(1, 65536, 65536, 32, 32, 128, 128, torch.float16)
    shared = replace(own, nheads_k=1)
    tiling = TILINGS["large"]
    assert predict(shared, tiling, CHIP).seconds <= predict(own, tiling, CHIP).seconds


def test_decode_occupies_every_core_and_reads_no_faster_than_memory() -> None:
    decode = SimulatedCall(1, 1, 65536, 32, 8, 128, 128, torch.float16)
    prediction = predict(decode, TILINGS["decode"], CHIP)
    assert prediction.num_splits == 3
    assert prediction.num_row_blocks == 24
    for seqlen_k in (8192, 65536):  # also where the cache would hold all keys: others have used it since
        cache = 2 * seqlen_k * 8 * 128 * 2
        seconds = predict(replace(decode, seqlen_k=seqlen_k), TILINGS["decode"], CHIP).seconds
        assert seconds - 2 * DEFAULT_COSTS.launch / CHIP.clock_hz > cache / CHIP.hbm_bytes_per_second
    assert predict(replace(decode, batch_size=8), TILINGS["decode"], CHIP).num_splits == 1


def test_one_core_fetches_what_others_find_in_the_cache() -> None:
    alone, shared, cached_rate = rate(CHIP, 24, 1), rate(CHIP, 24, 24), CHIP.l2_read_rate
    assert alone == pytest.approx(CHIP.memory_rate(24))
    assert alone < shared < cached_rate


@given(
    st.integers(2, 300),  # of a single query the rows are heads
    st.integers(1, 300),
    st.sampled_from([(-1, 0), (-1, -1), (40, 0), (20, 30), (-1, 7)]),
    st.sampled_from([16, 64]),
    st.sampled_from([16, 32, 128]),
)
@settings(max_examples=150, deadline=None)
def test_tiles_of_row_blocks_are_those_that_the_mask_leaves(
    seqlen_q: int, seqlen_k: int, window: tuple[int, int], rows: int, keys: int
) -> None:
    workload = SimulatedCall(1, seqlen_q, seqlen_k, 1, 1, 16, 16, torch.float16, *window)
    band = TileRange(seqlen_q, seqlen_k, *window)
    for block, (num_tiles, num_masked) in enumerate(workload.row_blocks(Tiling(rows, keys, 8, 1, True))):
        first, last = block * rows, min((block + 1) * rows, seqlen_q) - 1
        begin, end = band.row_begin(first), band.row_end(last)
        kinds = [band.classify(first, last, key, min(key + keys, end) - 1) for key in range(begin, end, keys)]
        assert num_tiles == max(len(kinds), 1)
        if workload.has_window and kinds:
            # The end of the keys makes a tile partial for the kernel, which then applies the mask as well.
            ragged = (end - begin) % keys != 0 and kinds[-1] is TileKind.FULL
            assert num_masked == sum(kind is not TileKind.FULL for kind in kinds) + ragged
        elif not workload.has_window:
            assert num_masked == 0


def test_useful_arithmetic_counts_visible_scores_only() -> None:
    causal = SimulatedCall(2, 3, 5, 4, 2, 16, 8, torch.float16, window_right=0)
    assert causal.useful_flops == 2 * 2 * 4 * (3 + 4 + 5) * (16 + 8)
    assert replace(causal, window_right=-1).useful_flops == 2 * 2 * 4 * 15 * (16 + 8)


@given(
    st.integers(1, 60),
    st.integers(1, 60),
    st.sampled_from([(-1, 0), (-1, -1), (4, 0), (20, 30), (-1, 7), (3, -1), (0, 0)]),
)
def test_useful_arithmetic_is_that_of_every_query(seqlen_q: int, seqlen_k: int, window: tuple[int, int]) -> None:
    band = TileRange(seqlen_q, seqlen_k, *window)
    pairs = sum(max(band.row_end(row) - band.row_begin(row), 0) for row in range(seqlen_q))
    call = SimulatedCall(1, seqlen_q, seqlen_k, 1, 1, 16, 16, torch.float16, *window)
    assert call.useful_flops == 2 * pairs * (16 + 16)


@pytest.mark.parametrize(("seqlen", "heads"), [(5000, 1), (777, 7), (4096, 50), (100, 100)])
def test_the_core_that_is_done_last_is_found_among_all_items(seqlen: int, heads: int) -> None:
    workload = SimulatedCall(1, seqlen, seqlen, heads, heads, 128, 128, torch.float16, window_right=0)
    items = whole_chip._items(workload, published.MEASURED_TILING, CHIP)
    cycles = np.arange(1.0, len(items.kinds) + 1)
    each = np.tile(cycles[items.kind_of], heads)
    last = max(each[core :: CHIP.num_cores].sum() for core in range(CHIP.num_cores))
    assert items.longest_core(cycles, CHIP.num_cores) == last
    assert items.count == len(each)


def test_a_prediction_simulates_few_row_blocks_at_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated = []

    def count(*arguments: Any) -> Any:
        simulated.append(arguments)
        return simulate(*arguments)

    monkeypatch.setattr("fastattention.backends.ascend.simulator.row_block.simulate", count)
    shorter, longer = (
        predict(
            SimulatedCall(1, seqlen, seqlen, 8, 8, 112, 112, torch.float16, window_right=0),
            published.MEASURED_TILING,
            CHIP,
        )
        for seqlen in (1 << 20, 1 << 26)
    )
    assert len(simulated) < 50
    assert longer.tflops == pytest.approx(shorter.tflops, rel=0.01)
    assert sum(longer.spent.values()) == pytest.approx(1.0)


# What it is for.


@pytest.mark.parametrize("seqlen", [8192, 16384, 32768, 131072])
@pytest.mark.parametrize("keys", [256, 512, 1024])
def test_two_level_tiling_is_at_least_twice_as_fast_as_unified(seqlen: int, keys: int) -> None:
    workload = published.single_head(seqlen)
    two_level = Tiling(128, keys, 64 * 64 // keys if keys > 256 else 16, preload=2, multibuffer=True)
    unified = predict(workload, unified_tiling(workload, CHIP), CHIP)
    assert unified.seconds / predict(workload, two_level, CHIP).seconds >= 2.0


@pytest.mark.parametrize("seqlen", [1024, 8192, 32768])
def test_causes_multiply_to_the_whole_gain(seqlen: int) -> None:
    workload = published.single_head(seqlen)
    tiling = replace(tiling_for(workload, CHIP), preload=2)
    found = causes(workload, tiling, CHIP)
    whole = predict(workload, unified_tiling(workload, CHIP), CHIP).seconds / predict(workload, tiling, CHIP).seconds
    assert math.prod(cause.factor for cause in found) == pytest.approx(whole)
    assert all(cause.factor >= 0.999 for cause in found)
    assert [cause.name for cause in found if cause.factor > 1.02][:2] == [
        "number of synchronisations",
        "number of write-backs and updates of O",
    ]


def test_ablation_shows_every_strategy_by_itself() -> None:
    workload = replace(published.single_head(16384), window_right=0)
    steps = ablation(workload, tiling_for(workload, CHIP), CHIP)
    assert [step.name for step in steps] == [
        "unified tiling",
        "two-level tiling",
        "+ deeper preload",
        "+ tiling-mask: hidden tiles skipped",
        "+ tiling-mask: no full mask read",
    ]
    whole = steps[0].prediction.seconds / steps[-1].prediction.seconds
    assert math.prod(step.gain for step in steps) == pytest.approx(whole)
    assert all(step.gain >= 0.999 for step in steps)
    assert steps[3].gain > 1.5  # nearly half of the tiles are hidden
    assert len(ablation(published.single_head(16384), published.MEASURED_TILING, CHIP)) == 3


def test_mask_has_the_same_size_at_any_length() -> None:
    for seqlen in (1024, 65536):
        tiled = replace(published.single_head(seqlen), window_right=0)
        assert tiled.mask_bytes == mask_tile(torch.device("cpu")).nbytes == 4 * 2**20
        assert replace(tiled, mask_mode=MaskMode.FULL).mask_bytes == seqlen**2
    assert published.single_head(1024).mask_bytes == 0


def test_standard_attention_stores_the_square_of_the_length() -> None:
    short, long = (
        predict_standard(published.single_head(seqlen), CHIP, StandardKind.FUSED_SOFTMAX) for seqlen in (8192, 16384)
    )
    assert long.score_bytes == 4 * short.score_bytes == 16384**2 * 4  # scores and weights in float16
    assert short.num_kernels == 3
    # Scores are written once and read once, and so are weights; all of it fits no cache.
    assert long.seconds > 4 * 2 * 16384**2 / CHIP.hbm_bytes_per_second


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_gain_over_standard_attention_grows_with_the_length(causal: bool) -> None:
    gains = []
    for seqlen in (2048, 8192, 32768):
        workload = SimulatedCall(1, seqlen, seqlen, 32, 32, 128, 128, torch.float16, window_right=0 if causal else -1)
        ours = predict(workload, tiling_for(workload, CHIP), CHIP).seconds
        fused, eager = (predict_standard(workload, CHIP, kind).seconds / ours for kind in StandardKind)
        assert eager > fused
        gains.append(fused)
    assert gains == sorted(gains)
    assert gains[-1] > 2.0
