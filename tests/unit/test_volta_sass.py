"""The reader of Volta's machine code: control codes, loops, the ways through them and their counts."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest
from volta_model import counts, flow, paths, peer, sass, tools
from volta_model.launch import TileKind

from fastattention.errors import CompileError

LISTING = """
Resource usage:
 Common:
  GLOBAL:0
 Function first:
  REG:24 STACK:8 SHARED:512 LOCAL:0 CONSTANT[0]:360 TEXTURE:0 SURFACE:0 SAMPLER:0

\tcode for sm_70
\t\tFunction : first
\t.headerflags\t@"EF_CUDA_SM70 EF_CUDA_VIRTUAL_SM(EF_CUDA_SM70)"
        /*0000*/                   S2R R8, SR_CTAID.X ;                     /* 0x0000000000087919 */
                                                                            /* 0x000e220000002500 */
        /*0010*/              @!P1 ISETP.NE.U32.AND P0, PT, R3, RZ, PT ;    /* 0x000000ff0300720c */
                                                                            /* 0x001fd80003f05070 */
        /*0020*/               @P0 BRA 0x0;                                 /* 0x0000009000008947 */
                                                                            /* 0x000fea0003800000 */
        /*0030*/                   HMMA.884.F32.F32.STEP0 R4, R68.reuse.ROW, R72.reuse.COL, R4 ;  /* 0x0 */
                                                                            /* 0x000fe200078e00ff */
\t\tFunction : second
        /*0000*/                   EXIT ;                                   /* 0x000000000000794d */
                                                                            /* 0x0c0fcc0003800000 */
""".replace("/* 0x0 */", "/* 0x0000004844047236 */")


def test_control_codes_and_resources() -> None:
    first, second = sass.parse(LISTING)
    assert (first.name, first.registers, first.stack_bytes, first.shared_bytes) == ("first", 24, 8, 512)
    assert (second.name, second.registers) == ("second", None)
    special, compare, branch, hmma = first.instructions
    assert special == sass.Instruction(0, "S2R R8, SR_CTAID.X", None, "S2R", 1, False, 0, None, 0, 0)
    assert compare.predicate == "!P1"
    assert (compare.opcode, compare.name) == ("ISETP.NE.U32.AND", "ISETP")
    assert (compare.stall, compare.yields, compare.wait_mask) == (12, True, 1)
    assert (branch.address, branch.predicate, branch.text, branch.target) == (0x20, "P0", "BRA 0x0", 0)
    assert (hmma.stall, hmma.yields, hmma.write_barrier, hmma.read_barrier) == (1, False, None, None)
    (leave,) = second.instructions
    assert (leave.stall, leave.yields, leave.reuse) == (6, True, 3)


@pytest.mark.parametrize(
    ("damaged", "message"),
    [
        (LISTING.replace("code for sm_70", "code for sm_80"), "sm_80"),
        (LISTING.replace("/* 0x000fea0003800000 */", ""), "no second word after"),
    ],
    ids=["another GPU", "one word"],
)
def test_what_has_no_such_control_codes_is_refused(damaged: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sass.parse(damaged)


def assembled(code: str) -> Any:
    """A function from lines "label: @P0 OPCODE operands | stall", where operands may be labels."""
    lines = [line.partition(": ") if ": " in line else ("", "", line) for line in code.strip().splitlines()]
    labels = {label.strip(): f"{16 * number:#x}" for number, (label, _, _) in enumerate(lines) if label}
    listing = ["\tcode for sm_70", "\t\tFunction : kernel"]
    for number, (_, _, line) in enumerate(lines):
        text, _, stall = line.partition(" | ")
        words = [labels.get(word, word) for word in text.split()]
        control = int(stall) | 1 << 4 | 7 << 5 | 7 << 8
        listing.append(f"        /*{16 * number:04x}*/  {' '.join(words)} ;  /* 0x{0:016x} */")
        listing.append(f"                /* 0x{control << 41:016x} */")
    (function,) = sass.parse("\n".join(listing))
    return function


QK, PV = "HMMA.884.F32.F32.STEP0 R4, R8.ROW, R12.COL, R4", "HMMA.884.F32.F32.STEP0 R4, R8.ROW, R12.ROW, R4"
KERNEL = f"""
        MOV R1, RZ | 2
        @P0 BRA tile | 5
        LDG.E.SYS R1, [R2] | 4
tile:   LDS.U.128 R4, [R2] | 4
inner:  {QK} | 2
        {QK} | 3
        @P1 BRA inner | 5
        @!P2 BRA whole | 6
mask:   FSEL R8, R8, -INF , !P3 | 2
whole:  MUFU.EX2 R9, R8 | 4
        @!P4 BRA kept | 5
raised: FMUL R4, R4, R9 | 2
kept:   {PV} | 2
        SHFL.BFLY PT, R7, R4, 0x2, 0x1f | 1
        @P5 BRA last | 5
next:   LDG.E.128.SYS R16, [R2] | 1
        STS.128 [R3], R16 | 2
last:   @P6 BRA tile | 5
        @P0 BRA done | 5
        STG.E.128.SYS [R2], R4 | 2
done:   EXIT | 5
"""


def at(*labels: str) -> list[int]:
    """Addresses of labels in KERNEL."""
    names = [line.partition(":")[0] if ":" in line else "" for line in KERNEL.strip().splitlines()]
    return [16 * names.index(label) for label in labels]


@pytest.fixture(scope="module", name="kernel")
def _kernel() -> Any:
    return assembled(KERNEL)


def names(path: list[Any]) -> list[str]:
    return [instruction.name for instruction in path]


def test_blocks_end_at_branches_and_begin_where_they_lead(kernel: Any) -> None:
    found = {block.address: block.successors for block in flow.blocks(kernel)}
    inner, mask, whole, done, last, tile = at("inner", "mask", "whole", "done", "last", "tile")
    assert found[inner] == (inner, inner + 3 * 16)
    assert found[mask] == (whole,)
    assert found[last] == (tile, last + 16)
    assert found[done] == (flow.END,)


def test_loops_are_found_with_those_inside(kernel: Any) -> None:
    (outer,) = flow.loops(kernel)
    assert flow.main_loop(kernel) == outer
    assert [outer.header, *(loop.header for loop in outer.nested())] == at("tile", "inner")
    assert (outer.hmma, outer.inner[0].hmma) == (3, 2)
    assert set(at("tile", "mask", "raised", "next", "last")) < set(outer.blocks)
    assert not set(at("done")) & set(outer.blocks)


def test_main_loop_is_the_one_with_most_tensor_instructions() -> None:
    small, large = f"one: {QK} | 2\n@P0 BRA one | 5", f"two: {QK} | 2\n{QK} | 2\n@P0 BRA two | 5"
    for code in (f"{small}\n{large}\nEXIT | 5", f"{large}\n{small}\nEXIT | 5"):
        assert flow.main_loop(assembled(code)).hmma == 2
    with pytest.raises(ValueError, match="kernel has no loop with HMMA"):
        flow.main_loop(assembled(f"{QK} | 2\nEXIT | 5"))


def test_a_loop_with_two_ways_in_is_refused() -> None:
    code = f"@P0 BRA second | 5\nfirst: {QK} | 2\nsecond: {QK} | 2\n@P1 BRA first | 5\nEXIT | 5"
    with pytest.raises(ValueError, match="the loop at 0x10 has ways in at 0x10, 0x20"):
        flow.loops(assembled(code))


def test_steady_path_is_that_of_most_tiles(kernel: Any) -> None:
    path = flow.steady_path(flow.main_loop(kernel), dict.fromkeys(at("inner"), 3))
    product = ["HMMA", "HMMA", "BRA"]
    softmax = ["MUFU", "BRA", "HMMA", "SHFL", "BRA"]
    assert names(path) == ["LDS", *3 * product, "BRA", *softmax, "LDG", "STS", "BRA"]


def test_steady_path_through_and_around_blocks(kernel: Any) -> None:
    loop, trips = flow.main_loop(kernel), dict.fromkeys(at("inner"), 1)
    assert "FSEL" in names(flow.steady_path(loop, trips, through=at("mask")))
    assert "FMUL" in names(flow.steady_path(loop, trips, through=at("raised")))
    assert "LDG" not in names(flow.steady_path(loop, trips, around=at("next")))
    with pytest.raises(ValueError, match="no way passes through the blocks at 0x"):
        flow.steady_path(loop, trips, through=at("done"))
    with pytest.raises(ValueError, match="no way leads there"):
        flow.steady_path(loop, trips, around=at("last"))


def test_how_often_products_run_must_be_said(kernel: Any) -> None:
    with pytest.raises(ValueError, match="how often does the inner loop at 0x40 run"):
        flow.steady_path(flow.main_loop(kernel), {})


def test_before_and_after_the_loop(kernel: Any) -> None:
    loop = flow.main_loop(kernel)
    assert names(flow.prologue(kernel, loop)) == ["MOV", "BRA"]  # the shortest way
    assert names(flow.epilogue(kernel, loop)) == ["BRA", "STG", "EXIT"]  # the way that stores


MANY_SCORES = "\n".join(["FSEL R8, R8, -INF , !P3 | 2"] * 8)
# Tiles that all see have code of their own; the other code asks what to mask. Two rows of results are stored a trip.
FULL_PIECE = f"""
        @P0 BRA asks | 5
        {QK} | 2
        {PV} | 2
        BRA next | 5"""
TWO_PIECES = f"""
        MOV R1, RZ | 2
tile:   MOV R2, RZ | 2{FULL_PIECE}
asks:   @P1 BRA next | 5
        {QK} | 2
        @P2 BRA whole | 5
        {MANY_SCORES}
whole:  {PV} | 2
        MUFU.EX2 R9, R8 | 4
next:   @P3 BRA tile | 5
row:    STG.E.128.SYS [R2], R4 | 2
        STG.E.128.SYS [R2+0x80], R8 | 2
        @P4 BRA row | 5
        EXIT | 5
"""


def test_ways_around_a_loop_with_code_for_full_tiles() -> None:
    tiles = paths.find_tiles(assembled(TWO_PIECES))
    assert names(tiles[TileKind.FULL]) == ["MOV", "BRA", "HMMA", "HMMA", "BRA", "BRA"]
    asking = ["MOV", "BRA", "BRA", "HMMA", "BRA"]
    assert names(tiles[TileKind.TESTED]) == [*asking, "HMMA", "MUFU", "BRA"]
    assert names(tiles[TileKind.MASKED]) == [*asking, *["FSEL"] * 8, "HMMA", "MUFU", "BRA"]
    assert names(tiles[TileKind.SKIPPED]) == ["MOV", "BRA", "BRA", "BRA"]


def test_code_that_asks_of_every_tile_is_that_of_full_ones() -> None:
    tiles = paths.find_tiles(assembled(TWO_PIECES.replace(FULL_PIECE, "")))
    assert names(tiles[TileKind.FULL]) == ["MOV", "BRA", "HMMA", "BRA", "HMMA", "MUFU", "BRA"]
    assert tiles[TileKind.TESTED] == tiles[TileKind.FULL]


def test_storing_loop_runs_until_all_results_are_stored() -> None:
    function = assembled(TWO_PIECES)
    assert names(paths.find_paths(function, 96).epilogue) == ["STG", "STG", "BRA"] * 3 + ["EXIT"]
    with pytest.raises(ValueError, match="stores 32 bytes a trip, no divisor of 80"):
        paths.find_paths(function, 80)


def test_how_often_loops_outside_the_main_one_run_must_be_said() -> None:
    function = assembled(TWO_PIECES)
    with pytest.raises(ValueError, match=r"how often does the loop at 0x\w+ run\? It is outside"):
        flow.epilogue(function, flow.main_loop(function))
    before = assembled(f"first: MOV R1, RZ | 2\n@P0 BRA first | 5\ntile: {QK} | 2\n@P1 BRA tile | 5\nEXIT | 5")
    with pytest.raises(ValueError, match="how often does the loop at 0x0 run"):
        flow.prologue(before, flow.main_loop(before))
    assert len(flow.prologue(before, flow.main_loop(before), {0: 3})) == 6


def test_counts_of_products_in_loops(kernel: Any) -> None:
    tile = counts.count(kernel, dict.fromkeys(at("inner"), 3))
    assert (tile.qk.hmma, tile.qk.instructions, tile.qk.issue_cycles) == (6, 9, 3 * (2 + 3 + 5))
    assert (tile.whole.hmma, tile.whole.shuffles, tile.whole.exponentials) == (7, 1, 1)
    assert tile.whole.accesses == {"LDG 16": 1, "LDS 16": 1, "STS 16": 1}
    assert tile.tensor_cycles == 14
    assert tile.scaled(7) == 256
    parts = (tile.qk, tile.rest, tile.pv)
    assert sum(part.issue_cycles for part in parts) == tile.whole.issue_cycles == 4 + 30 + 6 + 4 + 5 + 2 + 1 + 5 + 3 + 5
    assert sum(part.instructions for part in parts) == tile.whole.instructions


def straight(*kinds: str) -> Any:
    """One tile of straight code with a MUFU after each product."""
    body = "\n".join(f"{kind} | 2\nMUFU.EX2 R9, R8 | 4" for kind in kinds)
    return counts.count(assembled(f"tile: LDS.U.128 R4, [R2] | 1\n{body}\n@P0 BRA tile | 5\nEXIT | 5"))


def test_counts_of_products_in_a_line() -> None:
    tile = straight(QK, QK, PV, PV, PV)
    assert (tile.qk.instructions, tile.qk.issue_cycles) == (3, 8)
    assert (tile.pv.instructions, tile.pv.exponentials) == (5, 2)
    assert (tile.rest.instructions, tile.rest.issue_cycles) == (4, 1 + 4 + 4 + 5)


def test_products_that_overlap_are_not_told_apart() -> None:
    tile = straight(QK, PV, QK, PV)
    assert (tile.qk.instructions, tile.pv.instructions) == (0, 0)
    assert tile.rest == tile.whole


@pytest.mark.parametrize(
    ("headdim", "name", "products"),
    [(64, "64x64_rf", [2, 2]), (72, "32x128_rf", [3, 4]), (128, "32x128_rf", [4, 4]), (256, "32x128_gmem", [8, 4, 2])],
)
def test_pytorchs_kernel_for_a_headdim(headdim: int, name: str, products: list[int]) -> None:
    kernel = peer.serving(headdim)
    assert kernel.name == f"fmha_cutlassF_f16_aligned_{name}_sm70"
    assert list(kernel.trips(headdim).values()) == products


def test_accesses_that_are_switched_off_are_not_counted() -> None:
    load = assembled("LDG.E.128.SYS R16, [R2] | 1").instructions[0]
    found = counts.Counts.of([load, load.switched_off()])
    assert (found.instructions, found.issue_cycles, found.accesses) == (2, 2, {"LDG 16": 1})


def loads_of(kernel: Any, headdim: int) -> list[bool]:
    """Whether the prefetches of a tile load, in order, in loops made of nothing else."""
    trips, path = kernel.trips(headdim), []
    for loop in (kernel.qk_loop, kernel.pv_loop):
        inside = [a for a in sorted(kernel.prefetches) if a > loop and (a < kernel.pv_loop or loop == kernel.pv_loop)]
        path += [
            sass.Instruction(a, "LDG.E.128.SYS R4, [R2]", "P1", "LDG.E.128.SYS", 1, False, None, None, 0, 0)
            for _ in range(trips[loop])
            for a in inside
        ]
    return [not instruction.is_off for instruction in kernel.without_last_prefetches(path, headdim)]


@pytest.mark.parametrize(("headdim", "expected"), [(64, 4 + 2), (128, 3 * 5 + 3 * 4)])
def test_last_trip_of_pytorchs_loops_prefetches_nothing(headdim: int, expected: int) -> None:
    kernel = peer.serving(headdim)
    loads = loads_of(kernel, headdim)
    assert sum(loads) == expected
    assert not loads[-1]


def test_prefetch_that_is_not_where_it_was_read_is_reported() -> None:
    with pytest.raises(ValueError, match="64x64_rf_sm70: no prefetch at 0x2200, "):
        peer.serving(64).without_last_prefetches([], 64)


@pytest.mark.parametrize("release", ["12.8", "13.0"])
def test_disassembler_on_the_path_is_taken_unless_too_new_for_volta(
    release: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "bin" / "cuobjdump"
    tools.install(f"#!/bin/sh\necho Cuda compilation tools, release {release}, V1\n".encode(), installed, 0o755)
    wheel = tmp_path / "triton.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in ("cuobjdump", "nvdisasm"):
            archive.writestr(f"triton/backends/nvidia/bin/{name}", "#!/bin/sh\necho fetched\n")
    monkeypatch.setenv("PATH", f"{installed.parent}:/bin:/usr/bin")
    monkeypatch.setenv("FASTATTENTION_CACHE", str(tmp_path / "cache" / "kernels"))
    monkeypatch.setattr(tools, "downloaded", lambda requirement: zipfile.ZipFile(wheel))
    found = tools.cuobjdump()
    if release == "12.8":
        assert found == installed
    else:
        assert found.parent.parent == tmp_path / "cache" / "fastattention-volta"
        assert tools.run([str(found)]) == tools.run([str(found.with_name("nvdisasm"))]) == "fetched\n"


def test_a_tool_that_fails_is_reported_with_its_complaint() -> None:
    with pytest.raises(CompileError, match=r"sh -c .* fails: no such cubin"):
        tools.run(["sh", "-c", "echo no such cubin >&2; exit 1"])
