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

from fastattention.backends.ascend.chips import CHIPS, Chip
from fastattention.backends.ascend.mask_tile import mask_tile
from fastattention.backends.ascend.simulator import published, whole_chip
from fastattention.backends.ascend.simulator.calibration import DEFAULT_COSTS, PUBLISHED_STAGES, Costs
from fastattention.backends.ascend.simulator.core import WHAT_PIPES_DO, Setting
from fastattention.backends.ascend.simulator.events import Operation, Path, run, shared_rates
from fastattention.backends.ascend.simulator.gains import ablation, causes, unified_tiling
from fastattention.backends.ascend.simulator.memory import cached, rate
from fastattention.backends.ascend.simulator.row_block import row_block, row_block_operations, simulate
from fastattention.backends.ascend.simulator.standard import StandardKind, predict_standard
from fastattention.backends.ascend.simulator.tiles import HeadShape, Tiling
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
SHAPES = {"128": HeadShape(128, 128, 2), "256, float32": HeadShape(256, 256, 4), "64 and 16": HeadShape(64, 16, 2)}


def setting(
    tiling: Tiling, shape: HeadShape = SHAPES["128"], busy_cores: int = 1, costs: Costs = DEFAULT_COSTS
) -> Setting:
    return Setting(CHIP, tiling, shape, cached(CHIP, costs, busy_cores), costs)


def simulated(of: Setting, num_tiles: int, num_masked: int = 0) -> list[Operation]:
    operations = row_block_operations(of, num_tiles, num_masked)
    run(operations, of.memory.capacity)
    return operations


@pytest.fixture(
    params=[(t, s, n) for t in TILINGS for s in SHAPES for n in (1, 24)],
    ids=lambda of: f"{of[0]}, {of[1]}, cores-{of[2]}",
)
def case(request: pytest.FixtureRequest) -> tuple[Setting, list[Operation]]:
    tiling, shape, busy_cores = request.param
    of = setting(TILINGS[tiling], SHAPES[shape], busy_cores)
    return of, simulated(of, num_tiles=6, num_masked=2)


def select(operations: list[Operation], *key: str) -> list[Operation]:
    """The operations of a unit, a pipe and perhaps a stage, in their order."""
    return [one for one in operations if (one.unit, one.pipe, one.stage)[: len(key)] == key]


# Calibration and validation.


def test_stages_are_near_the_published_cycle_counts() -> None:
    residuals = published.residuals()
    assert residuals.keys() == PUBLISHED_STAGES.keys()
    assert all(abs(error) < 0.05 for error in residuals.values()), residuals
    for fitted in ("QK", "softmax"):  # stages with a constant of their own
        assert abs(residuals[fitted]) < 0.01


@pytest.mark.parametrize("validated", published.validate(), ids=lambda one: str(one.seqlen))
def test_whole_chips_are_near_the_published_latencies(validated: published.Validated) -> None:
    assert abs(validated.error) <= validated.allowed
    assert validated.allowed == (0.17 if validated.seqlen == 1024 else 0.12)


@pytest.mark.parametrize("validated", published.validate_few_cores(), ids=lambda one: f"{one.seqlen_q}x{one.seqlen_k}")
def test_few_busy_cores_are_near_the_published_latencies(validated: published.ValidatedFewCores) -> None:
    first, second = validated.errors
    if validated.cores <= 2:
        assert abs(first) < 0.12
        assert abs(second) < 0.13
    elif validated.cores <= 8:
        assert max(abs(first), abs(second)) < 0.10
    else:  # the cause of the slow 16 cores is not known
        assert -0.32 < min(first, second) <= max(first, second) < -0.20


# Rules of the machine.


def test_no_pipe_does_two_things_at_once(case: tuple[Setting, list[Operation]]) -> None:
    pipes = {(one.unit, one.pipe) for one in case[1]}
    assert pipes == set(WHAT_PIPES_DO)
    for pipe in pipes:
        assert all(later.start >= earlier.end for earlier, later in pairwise(select(case[1], *pipe)))


def test_nothing_starts_before_what_it_needs(case: tuple[Setting, list[Operation]]) -> None:
    for one in case[1]:
        assert one.end >= one.start
        assert all(one.start >= earlier.end + earlier.latency for earlier in one.after)


def test_units_hand_over_through_memory(case: tuple[Setting, list[Operation]]) -> None:
    of, operations = case
    handover = of.costs.handover
    steps = [
        (("Cube", "FIX", "QK"), ("Vector", "MTE2", "softmax")),
        (("Vector", "MTE3", "softmax"), ("Cube", "M", "PV")),
        (("Cube", "FIX", "PV"), ("Vector", "MTE2", "O update")),
    ]
    for tile in range(4):  # later ones have a mask, which is read ahead
        for writer, reader in steps:
            written = max(one.end for one in select(operations, *writer) if one.tile == tile)
            read = min(one.start for one in select(operations, *reader) if one.tile == tile)
            assert read >= written + handover - 1e-6
    stored = select(operations, "Vector", "MTE3", "result")[0]
    assert stored.start >= select(operations, "Vector", "V", "O update")[-1].end


def test_buffers_hold_no_more_than_they_have_room_for(case: tuple[Setting, list[Operation]]) -> None:
    of, operations = case

    def check(fills: list[Operation], releases: list[Operation], slots: int) -> None:
        assert len(fills) == len(releases)
        for index in range(slots, len(fills)):
            assert fills[index].start >= releases[index - slots].end - 1e-6

    products = select(operations, "Cube", "M")
    check(select(operations, "Cube", "MTE1"), products, 2)  # L0A and L0B
    results = [one for one in select(operations, "Cube", "FIX") if one.stage != "flag"]
    first_products = [next(one for one in (result, *result.after) if one.pipe == "M") for result in results]
    check(first_products, results, 2)  # L0C, at the latest by the last product into a half
    slots = of.tiling.num_buffers
    scores = [one for one in select(operations, "Vector", "MTE2", "softmax") if one.tile < 4]
    check(scores, [one for one in select(operations, "Vector", "V", "softmax") if one.tile < 4], slots)
    for tile in range(of.tiling.preload, 4):  # workspaces of scores
        read = max(one.end for one in scores if one.tile == tile - of.tiling.preload)
        assert min(one.start for one in select(operations, "Cube", "FIX", "QK") if one.tile == tile) >= read - 1e-6


def overlap(some: list[Operation], others: list[Operation]) -> bool:
    return any(one.start < other.end and other.start < one.end for one in some for other in others)


def test_stages_overlap() -> None:
    """Operations of the Cube overlap always, those of Cube and Vector where tiles are computed ahead."""
    for name in ("unified", "measured"):
        operations = simulated(setting(TILINGS[name]), 6)
        ahead = overlap(select(operations, "Cube", "M"), select(operations, "Vector", "V", "softmax"))
        assert ahead == (TILINGS[name].preload > 1)
    assert overlap(select(operations, "Cube", "M", "PV"), select(operations, "Cube", "FIX", "QK"))
    assert overlap(select(operations, "Cube", "M", "QK"), select(operations, "Cube", "FIX", "PV"))


@given(
    st.lists(st.tuples(st.floats(1, 200), st.sampled_from([(), (Path.IN, Path.L2), (Path.OUT, Path.L2)])), max_size=7),
    st.floats(20, 500),
)
def test_paths_are_shared_and_never_exceeded(asked: list[tuple[float, tuple[Path, ...]]], l2: float) -> None:
    capacity = {Path.IN: 110.0, Path.OUT: 82.0, Path.L2: l2}
    rates = shared_rates(asked, capacity)
    assert all(0 < rate <= wanted for rate, (wanted, _) in zip(rates, asked, strict=True))
    for path, limit in capacity.items():
        assert sum(rate for rate, (_, paths) in zip(rates, asked, strict=True) if path in paths) <= limit * (1 + 1e-9)
    if sum(wanted for wanted, _ in asked) <= min(capacity.values()):
        assert rates == [wanted for wanted, _ in asked]


def test_operations_that_share_a_path_take_longer_together() -> None:
    transfers = [Operation("Cube", "MTE2", "QK", 0, 1100.0, 110.0, (Path.IN,))]
    assert run(transfers, {Path.IN: 110.0}) == pytest.approx(10.0)
    both = [Operation(unit, "MTE2", "QK", 0, 1100.0, 110.0, (Path.IN,)) for unit in ("Cube", "Vector")]
    assert run(both, {Path.IN: 110.0}) == pytest.approx(20.0)


def test_operations_that_wait_for_each_other_are_refused() -> None:
    first = Operation("Cube", "M", "QK", 0, 1.0)
    second = Operation("Cube", "MTE1", "QK", 0, 1.0, after=(first,))
    first.after = (second,)
    with pytest.raises(AssertionError, match="wait for each other"):
        run([first, second], {})


def test_no_row_block_is_faster_than_its_bytes(case: tuple[Setting, list[Operation]]) -> None:
    of, operations = case
    cycles = max(one.end for one in operations)
    for path, capacity in of.memory.capacity.items():
        assert sum(one.amount for one in operations if path in one.paths) <= capacity * cycles * (1 + 1e-9)


def test_cube_does_all_the_arithmetic_and_no_more() -> None:
    for name, tiling in TILINGS.items():
        result = row_block(setting(tiling), 5)
        macs = 5 * tiling.outer_tile_m * tiling.outer_tile_n * (128 + 128)
        assert result.busy["Cube", "M"] == pytest.approx(macs / 16**3), name


def test_what_units_write_is_what_others_read() -> None:
    tiling, operations = published.MEASURED_TILING, row_block_operations(setting(published.MEASURED_TILING), 5)

    def size(*key: str) -> float:
        return sum(one.amount for one in select(operations, *key))

    rows, keys, headdim = tiling.outer_tile_m, tiling.outer_tile_n, 128
    assert size("Cube", "FIX", "QK") == size("Vector", "MTE2", "softmax") == 5 * rows * keys * 4
    assert size("Cube", "FIX", "PV") == size("Vector", "MTE2", "O update") == 5 * rows * headdim * 4
    weights, values = 5 * rows * keys * 2, 5 * keys * headdim * 2
    assert size("Vector", "MTE3", "softmax") == weights
    assert size("Cube", "MTE2", "PV") == weights + values
    assert size("Cube", "MTE2", "QK") == values
    assert size("Vector", "MTE3", "result") == size("Cube", "MTE2", "queries") == rows * headdim * 2


@pytest.mark.parametrize("tiling", TILINGS.values(), ids=list(TILINGS))
def test_more_busy_cores_are_not_faster(tiling: Tiling) -> None:
    cycles = [row_block(setting(tiling, busy_cores=cores), 20).cycles for cores in (1, 8, 20, 22, 24)]
    # They may be up to a per cent slower: a late operation may let another pass that others wait for.
    assert all(later >= 0.99 * earlier for earlier, later in pairwise(cycles))
    assert max(row_block(setting(tiling), 20).busy.values()) <= cycles[0]


def test_first_writes_cost_what_memory_takes() -> None:
    tiling = published.MEASURED_TILING
    plain, new = (
        row_block(setting(tiling, busy_cores=24, costs=costs), 64)
        for costs in (DEFAULT_COSTS, published.MEASURED_COSTS)
    )
    written = 8 * 128 * (256 * (4 + 2) + 128 * 4)  # scores, weights and products of eight tiles
    at_least = written / (CHIP.hbm_bytes_per_second / CHIP.clock_hz / 24)
    assert new.cycles - plain.cycles > at_least - 8 * plain.cycles / 64
    alone = [row_block(setting(tiling, costs=costs), 64).cycles for costs in (DEFAULT_COSTS, published.MEASURED_COSTS)]
    assert alone[0] == pytest.approx(alone[1], rel=0.01)  # one core does not write faster than memory accepts


@pytest.mark.parametrize("tiling", TILINGS.values(), ids=list(TILINGS))
@pytest.mark.parametrize("masked", ["none", "two", "all"])
def test_long_row_blocks_are_continued_as_they_would_be_simulated(tiling: Tiling, masked: str) -> None:
    num_masked = {"none": 0, "two": 2, "all": 40}[masked]
    of = setting(tiling, busy_cores=24)
    whole, continued = simulate(of, 40, num_masked), row_block(of, 40, num_masked)
    assert continued.cycles == pytest.approx(whole.cycles, rel=0.005)
    assert continued.busy == pytest.approx(whole.busy, rel=0.005)


def test_mask_costs_time_where_it_is_applied() -> None:
    cycles: dict[int, float] = defaultdict(float)
    for one in select(simulated(setting(published.MEASURED_TILING), 5, 2), "Vector", "V", "softmax"):
        cycles[one.tile] += one.end - one.start
    plain, masked = [cycles[tile] for tile in range(3)], [cycles[tile] for tile in range(3, 5)]
    assert max(plain) < min(masked)
    none, half, everything = (row_block(setting(TILINGS["unified"]), 40, masked).cycles for masked in (0, 20, 40))
    assert none < half < everything


# The whole chip.


def test_shares_of_a_call_are_shares() -> None:
    prediction = predict(published.single_head(4096), published.MEASURED_TILING, CHIP)
    assert 0 < max(prediction.busy.values()) < 1 - prediction.idle < 1
    assert prediction.num_row_blocks == 32


def test_cores_without_a_row_block_leave_the_cache_to_the_others() -> None:
    """32 row blocks run on 24 cores: the 8 of the second wave are faster than the first."""
    launch = DEFAULT_COSTS.launch / CHIP.clock_hz
    one_wave, short, long = (
        predict(replace(published.single_head(4096), seqlen_q=128 * blocks), published.MEASURED_TILING, CHIP)
        for blocks in (24, 32, 48)
    )
    assert short.idle > 0.25
    assert 1.7 < (short.seconds - launch) / (one_wave.seconds - launch) < 1.95
    assert (long.seconds - launch) / (one_wave.seconds - launch) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("of_cores", "cycles"), [([4, 4, 4], 4), ([4, 0, 0], 4), ([4, 8, 8], 4 + 3), ([2, 4, 6], 2 + 1.5 + 1)]
)
def test_a_core_gets_faster_when_others_are_done(of_cores: list[float], cycles: float) -> None:
    speed = {1: 0.5, 2: 0.75, 3: 1.0} if of_cores[1] else {1: 1.0}
    assert whole_chip._until_done(np.array(of_cores, float), speed.__getitem__) == pytest.approx(cycles)


def seconds(workload: SimulatedCall, tiling: Tiling, chip: Chip = CHIP, costs: Costs = DEFAULT_COSTS) -> float:
    return predict(workload, tiling, chip, costs).seconds


@pytest.mark.parametrize("tiling", [TILINGS["unified"], TILINGS["large"]], ids=["unified", "two-level"])
def test_longer_takes_longer_and_more_of_anything_is_not_faster(tiling: Tiling) -> None:
    times = [seconds(published.single_head(seqlen), tiling) for seqlen in (512, 1024, 4096, 16384)]
    assert times == sorted(times)
    base = published.single_head(4096)
    slower: tuple[dict[str, Any], ...] = (
        {"nheads": 4},
        {"batch_size": 4},
        {"headdim": 256, "headdim_v": 256},
        {"dtype": torch.float32},
        {"window_right": 0, "mask_mode": MaskMode.FULL},
    )
    assert all(seconds(replace(base, **changes), tiling) > times[2] for changes in slower)
    assert seconds(replace(base, score_bytes=2), tiling) < times[2]
    assert seconds(base, tiling, costs=replace(DEFAULT_COSTS, handover=1000)) > times[2]
    by_chip = [seconds(published.single_head(16384), tiling, CHIPS[f"910B{number}"]) for number in (1, 2, 3, 4)]
    assert by_chip == sorted(set(by_chip))
    own = SimulatedCall(1, 65536, 65536, 32, 32, 128, 128, torch.float16)
    assert seconds(replace(own, nheads_k=1), tiling) <= seconds(own, tiling)


def test_nothing_exceeds_the_peak() -> None:
    for dtype in (torch.float16, torch.float32):
        workload = SimulatedCall(1, 16384, 16384, 32, 32, 256, 256, dtype)
        assert 0.3 < predict(workload, tiling_for(workload, CHIP), CHIP).fraction_of_peak < 1.0


def test_decode_occupies_every_core_and_reads_no_faster_than_memory() -> None:
    decode = SimulatedCall(1, 1, 65536, 32, 8, 128, 128, torch.float16)
    prediction = predict(decode, TILINGS["decode"], CHIP)
    assert prediction.num_splits == 3
    assert prediction.num_row_blocks == 24
    for seqlen_k in (8192, 65536):  # even where the cache would hold all keys, because other layers have used it since
        cache = 2 * seqlen_k * 8 * 128 * 2
        kernels = seconds(replace(decode, seqlen_k=seqlen_k), TILINGS["decode"])
        assert kernels - 2 * DEFAULT_COSTS.launch / CHIP.clock_hz > cache / CHIP.hbm_bytes_per_second
    assert predict(replace(decode, batch_size=8), TILINGS["decode"], CHIP).num_splits == 1


def test_one_core_fetches_what_others_find_in_the_cache() -> None:
    alone, shared, cached_rate = rate(CHIP, 24, 1), rate(CHIP, 24, 24), CHIP.l2_read_rate
    assert alone == pytest.approx(CHIP.memory_rate(24))
    assert alone < shared < cached_rate


@given(
    st.integers(2, 300),  # with a single query the rows are heads
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
    for block, (num_tiles, num_masked) in enumerate(workload.row_blocks(rows, keys)):
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


@given(
    st.integers(1, 60),
    st.integers(1, 60),
    st.sampled_from([(-1, 0), (-1, -1), (4, 0), (20, 30), (-1, 7), (3, -1), (0, 0)]),
)
def test_useful_arithmetic_is_that_of_every_query(seqlen_q: int, seqlen_k: int, window: tuple[int, int]) -> None:
    band = TileRange(seqlen_q, seqlen_k, *window)
    pairs = sum(max(band.row_end(row) - band.row_begin(row), 0) for row in range(seqlen_q))
    call = SimulatedCall(3, seqlen_q, seqlen_k, 4, 2, 16, 8, torch.float16, *window)
    assert call.useful_flops == 2 * 3 * 4 * pairs * (16 + 8)


@pytest.mark.parametrize(("seqlen", "heads"), [(5000, 1), (777, 7), (4096, 50), (100, 100)])
def test_the_core_that_is_done_last_is_found_among_all_items(seqlen: int, heads: int) -> None:
    workload = SimulatedCall(1, seqlen, seqlen, heads, heads, 128, 128, torch.float16, window_right=0)
    items = whole_chip._items(workload, published.MEASURED_TILING, CHIP)
    cycles = np.arange(1.0, len(items.kinds) + 1)
    each = np.tile(cycles[items.kind_of], heads)
    last = max(each[core :: CHIP.num_cores].sum() for core in range(CHIP.num_cores))
    assert items.of_cores(cycles, CHIP.num_cores).max() == last
    assert items.count == len(each)


def test_a_prediction_simulates_few_row_blocks_at_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def count(*arguments: Any) -> Any:
        calls.append(arguments)
        return simulate(*arguments)

    monkeypatch.setattr("fastattention.backends.ascend.simulator.row_block.simulate", count)
    call = SimulatedCall(1, 1 << 20, 1 << 20, 8, 8, 112, 112, torch.float16, window_right=0)
    shorter = predict(call, published.MEASURED_TILING, CHIP)
    longer = predict(replace(call, seqlen_q=1 << 26, seqlen_k=1 << 26), published.MEASURED_TILING, CHIP)
    assert len(calls) < 50
    assert longer.tflops == pytest.approx(shorter.tflops, rel=0.01)
    assert 0 <= longer.idle < 0.01


# The gains that it predicts.


@pytest.mark.parametrize("seqlen", [8192, 16384, 32768, 131072])
@pytest.mark.parametrize("keys", [256, 512, 1024])
def test_two_level_tiling_is_at_least_twice_as_fast_as_unified(seqlen: int, keys: int) -> None:
    workload = published.single_head(seqlen)
    two_level = Tiling(128, keys, 64 * 64 // keys if keys > 256 else 16, preload=2, multibuffer=True)
    assert seconds(workload, unified_tiling(workload, CHIP)) / seconds(workload, two_level) >= 2.0


@pytest.mark.parametrize("seqlen", [1024, 8192, 32768])
def test_causes_multiply_to_the_whole_gain(seqlen: int) -> None:
    workload = published.single_head(seqlen)
    tiling = replace(tiling_for(workload, CHIP), preload=2)
    found = causes(workload, tiling, CHIP)
    whole = seconds(workload, unified_tiling(workload, CHIP)) / seconds(workload, tiling)
    assert math.prod(cause.factor for cause in found) == pytest.approx(whole)
    assert all(cause.factor >= 0.99 for cause in found)
    if seqlen > 1024:  # with 8 row blocks of 128 most cores have no work
        assert max(found, key=lambda cause: cause.factor).name == "overlap of Cube and Vector"


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
        ours = seconds(workload, tiling_for(workload, CHIP))
        fused, eager = (predict_standard(workload, CHIP, kind).seconds / ours for kind in StandardKind)
        assert eager > fused
        gains.append(fused)
    assert gains == sorted(gains)
    assert gains[-1] > 2.0
