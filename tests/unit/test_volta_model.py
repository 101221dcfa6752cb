"""The model of a Volta SM on short programs, whose cycles can be counted by hand."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from volta_model import (
    assumptions,
    chip,
    grid,
    launch,
    multiprocessor,
    operation,
    paths,
    predict,
    published,
    report,
    sass,
)

Unit = operation.Unit
Kind = launch.TileKind

# Instructions are fetched at once, and a step of an m8n8k4 takes exactly two cycles, so that counting is easy.
PLAIN = replace(chip.V100, fetch_latency=0, fetch_width=math.inf, tensor_interval=2.0)


def program(*lines: str) -> list[Any]:
    """A program of instructions, each "opcode operands; key=value ..." with changes from stall=1."""
    instructions = []
    for index, line in enumerate(lines):
        text, _, control = line.partition(";")
        fields = {"stall": 1, "yields": False, "write_barrier": None, "read_barrier": None, "wait_mask": 0, "reuse": 0}
        fields.update({key: int(value) for key, value in (item.split("=") for item in control.split())})
        instructions.append(sass.Instruction(16 * index, text, None, text.split()[0], **fields))
    return instructions


EXIT = "EXIT"


def run_warps(*ctas: list[list[Any]]) -> Any:
    """Simulates CTAs, each of them given by the instructions of its warps."""
    return multiprocessor.Multiprocessor(PLAIN).run(
        [[operation.operations(warp, PLAIN) for warp in cta] for cta in ctas]
    )


def run(*lines: str, warps: int = 1, ctas: int = 1, on: Any = PLAIN) -> Any:
    """Simulates CTAs whose warps all execute these lines."""
    path = operation.operations(program(*lines), on)
    return multiprocessor.Multiprocessor(on).run([[path] * warps] * ctas)


def hmma(number: int) -> list[str]:
    """Steps of m8n8k4 with the stalls that a compiler gives them."""
    return [f"HMMA.884.F32.F32.STEP{i % 4} R0, R8.ROW, R10.COL, R0; stall=2" for i in range(number)]


CHAIN = ["FADD R0, R0, R1; stall=4"] * 50
USE = "FADD R2, R0, R0; wait_mask=1"
WIDE_LOAD = "LDG.E.128 R0, [R4]; write_barrier=0 stall=2"
LATE = PLAIN.queue_length  # entries that are still in a unit's queue when the last instruction has issued
# (lines of every warp, cycles, and by how many they may differ), warps
CYCLES: dict[str, tuple[list[str], float, int, int]] = {
    "a lone warp takes two cycles a step, and EXIT one": ([*hmma(40), EXIT], 81, 0, 1),
    "schedulers have tensor cores of their own": ([*hmma(40), EXIT], 81, 0, 4),
    "four warps of a scheduler share its tensor cores": ([*hmma(40), EXIT], 4 * 80, 4, 16),
    "dependent additions take four cycles": ([*CHAIN, EXIT], 201, 0, 1),
    "two warps fill each other's stalls": ([*CHAIN, EXIT], 203, 0, 5),
    "a scheduler issues one a cycle": ([*["FADD R0, R1, R2", "IADD3 R3, R4, R5, RZ"] * 50, EXIT], 101, 1, 1),
    "a unit takes one every two cycles": ([*["FADD R0, R1, R2"] * 100, EXIT], 200, 1, 1),
    "a consumer waits for its load": (["LDS R0, [R1]; write_barrier=0 stall=2", USE], PLAIN.shared_latency + 1, 0, 1),
    "others pass a load": (["LDS R0, [R1]; stall=2", "FADD R2, R3, R3", EXIT], 4, 0, 1),
    "one scheduler loads every fourth cycle": ([*["LDS R0, [R1]"] * 50, EXIT], 4 * (50 - LATE), 4, 1),
    "exponentials take eight cycles": ([*["MUFU.EX2 R0, R0"] * 50, EXIT], 8 * (50 - LATE), 8, 1),
    "local memory hits the L1": (["LDL R0, [R1+0x4]; write_barrier=0 stall=2", USE], PLAIN.l1_latency + 1, 0, 1),
    "a load takes the L2's latency": ([WIDE_LOAD, USE], PLAIN.l2_latency + 512 / PLAIN.l2_bytes_a_cycle, 4, 1),
}


@pytest.mark.parametrize(("lines", "cycles", "tolerance", "warps"), CYCLES.values(), ids=CYCLES)
def test_cycles_of(lines: list[str], cycles: float, tolerance: int, warps: int) -> None:
    assert run(*lines, warps=warps).cycles == pytest.approx(cycles, abs=tolerance)


def test_busy_cycles_of_units() -> None:
    assert run(*hmma(40), EXIT).busy[Unit.TENSOR] == 80
    assert run(*["MUFU.EX2 R0, R0"] * 50, EXIT).busy[Unit.SPECIAL] == 400


def test_measured_interval_of_m8n8k4_is_kept_on_average() -> None:
    outcome = run(*hmma(400), EXIT, on=replace(PLAIN, tensor_interval=8.38 / 4))
    assert outcome.cycles == pytest.approx(100 * 8.38, abs=2)


@pytest.mark.parametrize(("suffix", "wavefronts"), [("", 1), (".64", 2), (".128", 4)])
def test_shared_memory_gives_128_bytes_a_cycle(suffix: str, wavefronts: int) -> None:
    """Four schedulers load at once; their total need decides once it exceeds one scheduler's own path to memory."""
    outcome = run(*[f"LDS.U{suffix} R0, [R1]"] * 50, EXIT, warps=4)
    assert outcome.shared_wavefronts == 4 * 50 * wavefronts
    # Entries still in the queues when the last instruction issued are served later.
    served = 50 * 4 * wavefronts
    waiting = PLAIN.queue_length * 4 * wavefronts
    assert served - waiting - 4 <= outcome.cycles <= served + 8


def test_barrier_lets_warps_go_on_when_the_last_has_come() -> None:
    """Warp 1 comes 100 cycles later."""
    early = program("BAR.SYNC 0x0; stall=5", "FADD R0, R0, R0", EXIT)
    late = program(*["FADD R0, R0, R0; stall=10"] * 10, "BAR.SYNC 0x0; stall=5", "FADD R0, R0, R0", EXIT)
    assert run_warps([early, late]).cycles == 100 + PLAIN.barrier_latency + 2  # the addition, and EXIT


def test_barriers_of_ctas_do_not_know_each_other() -> None:
    alone = run("BAR.SYNC 0x0; stall=5", EXIT, warps=4)
    assert run("BAR.SYNC 0x0; stall=5", EXIT, warps=4, ctas=2).cycles <= alone.cycles + 1


def test_barrier_waits_for_arrivals_not_for_loads() -> None:
    """Warp 1 waits for its load after the barrier; warp 0, which has none, does not."""
    plain = program("BAR.SYNC 0x0; stall=5", *["FADD R0, R0, R0; stall=4"] * 10, EXIT)
    loads = program("LDG.E R0, [R2]; write_barrier=0 stall=2", "BAR.SYNC 0x0; stall=5", USE)
    outcome = run_warps([plain, loads])
    assert outcome.cycles == pytest.approx(PLAIN.l2_latency + 128 / PLAIN.l2_bytes_a_cycle, abs=4)
    assert outcome.lost["barrier"] == pytest.approx(PLAIN.barrier_latency, abs=3)  # warp 0; warp 1 waits for its load


def test_opening_barrier_wakes_a_scheduler_that_waits_for_something_else() -> None:
    """Warps 0 and 4 share a scheduler; while warp 4 waits for a load, warp 0 goes on as soon as warp 1 arrives."""
    work = ["FADD R0, R0, R0; stall=4"] * 50
    early = program("BAR.SYNC 0x0; stall=5", *work, "BAR.SYNC 0x0; stall=5", EXIT)
    late = program("FADD R0, R0, R0; stall=15", "BAR.SYNC 0x0; stall=5", "BAR.SYNC 0x0; stall=5", EXIT)
    load = program("LDG.E R0, [R2]; write_barrier=0 stall=2", USE, EXIT)
    outcome = run_warps([early, late], [load])
    assert outcome.cycles == pytest.approx(15 + PLAIN.barrier_latency + 200 + PLAIN.barrier_latency, abs=8)


def test_warps_that_have_ended_are_not_waited_for() -> None:
    short, long = program(EXIT), program("FADD R0, R0, R0; stall=9", "BAR.SYNC 0x0; stall=5", EXIT)
    assert run_warps([short, long]).cycles == 9 + PLAIN.barrier_latency + 1


def test_loads_share_the_bandwidth_of_the_second_level_cache() -> None:
    many = run(*[WIDE_LOAD.replace(" stall=2", "")] * 100, "NOP; stall=2", USE)
    assert many.global_bytes == 100 * 512
    assert many.cycles == pytest.approx(PLAIN.l2_latency + 100 * 512 / PLAIN.l2_bytes_a_cycle, rel=0.02)


def test_share_of_loads_that_hit_the_first_level_cache() -> None:
    assert run("LDL R0, [R1+0x4]; write_barrier=0 stall=2", USE).global_bytes == 0
    half, all_of_it = (run(WIDE_LOAD, USE, on=replace(PLAIN, l1_share=share)) for share in (0.5, 1.0))
    assert (half.global_bytes, all_of_it.global_bytes) == (256, 0)
    assert all_of_it.cycles == pytest.approx(PLAIN.l1_latency + 4, abs=1)  # and four wavefronts
    assert run("STG.E.128 [R4], R0", EXIT, on=replace(PLAIN, l1_share=1.0)).global_bytes == 512


def test_load_that_is_switched_off_takes_an_issue_slot_and_no_more() -> None:
    load, use, leave = program(WIDE_LOAD, USE, EXIT)
    outcome = run_warps([[load.switched_off(), use, leave]])
    assert (outcome.cycles, outcome.issued, outcome.global_bytes) == (4, 3, 0)


def test_straight_code_beyond_the_small_cache_is_bound_by_fetching() -> None:
    """16 bytes a cycle for four schedulers: each gets a quarter of an instruction a cycle."""
    narrow = replace(PLAIN, fetch_width=16, fetch_latency=10)
    lines = [*["FADD R0, R1, R2; stall=2"] * 2000, EXIT]
    assert run(*lines, warps=4, on=narrow).cycles == pytest.approx(2000 * 4, rel=0.05)
    assert run(*lines, warps=4).cycles == pytest.approx(2000 * 2, rel=0.01)


def test_loop_inside_the_small_cache_is_fetched_once() -> None:
    body = program(*["FADD R0, R1, R2; stall=2"] * 80)
    assert run_warps([[*body * 10, *program(EXIT)]]).lines_fetched <= 10 + PLAIN.prefetch_lines


def test_loop_that_exceeds_the_small_cache_is_fetched_every_time() -> None:
    lines = PLAIN.l0_bytes // PLAIN.line_bytes * 2
    body = program(*["FADD R0, R1, R2; stall=2"] * (lines * PLAIN.line_bytes // sass.INSTRUCTION_BYTES))
    assert run_warps([[*body * 3, *program(EXIT)]]).lines_fetched >= 3 * lines


def test_idle_tensor_cycles_are_blamed_on_what_is_waited_for() -> None:
    outcome = run("LDG.E R0, [R4]; write_barrier=2 stall=2", "FADD R2, R0, R0; wait_mask=4", EXIT)
    assert outcome.lost.most_common(1)[0][0] == "global memory"
    assert sum(outcome.lost.values()) == pytest.approx(outcome.cycles, abs=2)


def test_unknown_instruction_is_refused() -> None:
    with pytest.raises(ValueError, match=r"does not know TEX\.LL at 0x0"):
        run("TEX.LL R0, R1")


SHAPE = launch.Launch(tile_m=64, tile_n=64, num_warps=4, registers=128, shared_bytes=16384, mask_rows=64)


@pytest.mark.parametrize(
    ("registers", "shared_bytes", "num_warps", "residents"),
    [
        (128, 16384, 4, 4),  # 128 registers x 128 threads x 4 = 65536
        (168, 16384, 4, 3),
        (129, 16384, 4, 3),  # registers come in 8 a thread: 136
        (255, 16384, 4, 2),
        (32, 16384, 4, 6),  # shared memory: 6 x 16 KB
        (32, 49152, 4, 2),
        (32, 0, 16, 4),  # 64 warps
    ],
)
def test_resident_ctas(registers: int, shared_bytes: int, num_warps: int, residents: int) -> None:
    shape = replace(SHAPE, registers=registers, shared_bytes=shared_bytes, num_warps=num_warps)
    assert shape.residents(chip.V100) == residents


def test_cta_that_fits_no_sm_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        replace(SHAPE, shared_bytes=100_000).residents(chip.V100)


def problem(seqlen: int, *, causal: bool) -> Any:
    return launch.Problem(seqlen=seqlen, batch_size=1, nheads=1, headdim=64, causal=causal)


def test_causal_warps_skip_and_mask_tiles_on_the_diagonal() -> None:
    shape = launch.Launch(128, 64, 4, 255, 0, mask_rows=32)
    kinds = [[kind.value for kind in shape.kinds(problem(256, causal=True), 1, warp)] for warp in range(4)]
    assert kinds[0] == kinds[1] == ["full", "full", "masked", "skipped"]
    assert kinds[2] == kinds[3] == ["full", "full", "tested", "masked"]
    assert shape.num_full(problem(256, causal=True), 1) == 2


def test_tiles_without_a_mask_are_full_but_for_the_last_keys() -> None:
    assert list(SHAPE.kinds(problem(128, causal=False), 0, 0)) == [Kind.FULL] * 2
    assert list(SHAPE.kinds(problem(100, causal=False), 0, 0)) == [Kind.FULL, Kind.MASKED]


def test_kernel_that_asks_all_warps_alike_tests_no_full_tile() -> None:
    shape = replace(SHAPE, masks_touching=True)
    kinds = {kind for warp in range(4) for kind in shape.kinds(problem(256, causal=True), 3, warp)}
    assert kinds == {Kind.FULL, Kind.MASKED}


def test_useful_flops_count_the_triangle_once() -> None:
    assert problem(4096, causal=False).useful_flops == 4 * 4096**2 * 64
    assert problem(4096, causal=True).useful_flops == 4 * (4096 * 4097 / 2) * 64


def test_waves_and_their_tail() -> None:
    """Two SMs, one CTA each at a time, 10 cycles a CTA: five CTAs take three waves. Long CTAs come first."""
    pace = [grid.Pace(overhead=2.0, tile=1.0)]
    assert grid.grid_cycles([8] * 4, 2, pace) == pytest.approx(20)
    assert grid.grid_cycles([8] * 5, 2, pace) == pytest.approx(30)
    assert grid.grid_cycles([20, 3, 2, 1], 2, pace) < grid.grid_cycles([1, 2, 3, 20], 2, pace)


def test_ctas_that_are_left_go_to_different_sms_and_run_faster_alone() -> None:
    """Two SMs have room for two CTAs each: six CTAs are a full wave, then one CTA alone on each SM."""
    paces = [grid.Pace(overhead=1.0, tile=1.0), grid.Pace(overhead=1.0, tile=1.5)]
    assert grid.grid_cycles([10] * 6, 2, paces) == pytest.approx((1 + 15) + (1 + 10), abs=1)


def attention_like(tile: list[str]) -> Any:
    """Paths of a kernel whose every tile is the same."""
    body = program(*tile)
    return paths.Paths(program("NOP"), dict.fromkeys(Kind, body), program(EXIT))


def test_tensor_bound_kernel_reaches_the_peak_of_the_chip() -> None:
    """64 x 64 x 16 twice for four warps is 64 steps each: 128 cycles of all tensor cores."""
    model = predict.Model(attention_like(hmma(128)), SHAPE, chip=PLAIN)
    prediction = model.predict(launch.Problem(seqlen=16384, batch_size=4, nheads=32, headdim=16, causal=False))
    peak = 80 * 1530e6 * 4 * 128 * 2 * 1e-12
    assert prediction.residents == 4
    assert prediction.tflops == pytest.approx(peak, rel=0.02)
    assert prediction.unit_shares["tensor"] == pytest.approx(1.0, abs=0.01)
    assert prediction.tile_cycles == pytest.approx(prediction.tensor_cycles, rel=0.02)


def test_every_uncertain_figure_is_varied_both_ways() -> None:
    """chip.py marks guesses with ? and measurements on younger GPUs with H."""
    source = Path(chip.__file__).read_text()
    marked = set(re.findall(r"^    (\w+): \w+ = [^#\n]+# .*?(?:\?|\bH\b)", source, re.MULTILINE))
    assert {"queue_length", "special_latency", "fetch_width", "l1_share"} <= marked
    values: dict[str, set[float]] = {}
    for _, changed in assumptions.changes():
        for name in marked:
            values.setdefault(name, set()).add(getattr(changed, name) - getattr(chip.V100, name))
    for name in marked - {"l1_share"}:  # a share of nothing cannot be halved
        assert min(values[name]) < 0 < max(values[name]), name
    assert values["l1_share"] == {0.0, 0.5, 1.0}


def test_what_is_predicted_is_labelled_so() -> None:
    faster, slower = (
        predict.Model(attention_like(hmma(number)), SHAPE, chip=PLAIN).predict(problem(1024, causal=False))
        for number in (64, 512)
    )
    compared = report.Compared(ours=faster, theirs=slower)
    assert compared.derated_ratio == pytest.approx(compared.ratio * 0.75)
    judged = report.Judged(published.Figure(problem(1024, causal=False), faster.tflops / 2, "somebody"), faster)
    document = report.as_json([judged], [compared], [report.Assumption("none", 1.0, [2.0])])
    assert document["published"][0]["predicted"]["error"] == pytest.approx(1.0)
    assert document["published"][0]["source"] == "somebody"
    assert set(document) == {"published", "predicted"}
    assert set(document["predicted"]) == {"compared", "assumptions"}
