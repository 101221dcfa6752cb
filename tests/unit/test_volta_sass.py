"""The reader of Volta's machine code: control codes, loops, the paths through them and their counts."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest
import typer
from harness import run_tool
from volta_model import backward, counts, flow, kernels, paths, peer, peer_backward, sass, tools
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
    ("text", "damage", "message"),
    [("code for sm_70", "code for sm_80", "sm_80"), ("/* 0x000fea0003800000 */", "", "no second word after")],
    ids=["another GPU", "one word"],
)
def test_what_has_no_such_control_codes_is_refused(text: str, damage: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sass.parse(LISTING.replace(text, damage))


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


def at(*labels: str, code: str = KERNEL) -> list[int]:
    """Addresses of labels."""
    names = [line.partition(":")[0] if ":" in line else "" for line in code.strip().splitlines()]
    return [16 * names.index(label) for label in labels]


@pytest.fixture(scope="module", name="kernel")
def _kernel() -> Any:
    return assembled(KERNEL)


def names(path: list[Any]) -> str:
    return " ".join(instruction.name for instruction in path)


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


def test_branches_of_warps_that_may_have_parted_go_both_ways() -> None:
    found = flow.blocks(assembled("first: BRA.DIV last | 5\nMOV R1, RZ | 2\nlast: EXIT | 5"))
    assert found[0].successors == (32, 16)


HEADS = f"""
zeros:  STG.E.128.SYS [R2], RZ | 2
        STG.E.SYS [R3], RZ | 2
        @P3 BRA zeros | 5
head:   MOV R1, RZ | 2
tile:   LDS.U.128 R4, [R2] | 4
        {QK} | 2
        {PV} | 2
        @P0 BRA tile | 5
        @P1 BRA head | 5
row:    STG.E.128.SYS [R2], R4 | 2
        @P4 BRA row | 5
        EXIT | 5
"""


def test_loop_over_tiles_is_found_inside_one_over_heads() -> None:
    function = assembled(HEADS)
    assert names(flow.steady_path(flow.tile_loop(function), {})) == "LDS HMMA HMMA BRA"
    assert flow.tile_loop(assembled(KERNEL)) == flow.main_loop(assembled(KERNEL))


def test_only_loops_after_the_main_one_store_results() -> None:
    function = assembled(HEADS)
    assert [loop.header for loop in flow.loops_after(function, flow.main_loop(function))] == [9 * 16]
    code = HEADS.replace("zeros:  ", "        @P5 BRA head | 5\nzeros:  ").replace("@P1 BRA head", "MOV R1, RZ")
    assert names(paths.find_paths(assembled(code), 48).epilogue) == f"MOV{3 * ' STG BRA'} EXIT"


def test_steady_path_is_that_of_most_tiles(kernel: Any) -> None:
    path = flow.steady_path(flow.main_loop(kernel), dict.fromkeys(at("inner"), 3))
    assert names(path) == f"LDS{3 * ' HMMA HMMA BRA'} BRA MUFU BRA HMMA SHFL BRA LDG STS BRA"


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
    assert names(flow.prologue(kernel, loop)) == "MOV BRA"  # the shortest path
    assert names(flow.epilogue(kernel, loop)) == "BRA STG EXIT"  # the path that stores


MANY_SCORES = "\n".join(["FSEL R8, R8, -INF , !P3 | 2"] * 8)
# Fully visible tiles have code of their own; the other code checks the mask. Each trip stores two rows of results.
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
    assert names(tiles[TileKind.FULL]) == "MOV BRA HMMA HMMA BRA BRA"
    assert names(tiles[TileKind.TESTED]) == "MOV BRA BRA HMMA BRA HMMA MUFU BRA"
    assert names(tiles[TileKind.MASKED]) == f"MOV BRA BRA HMMA BRA{8 * ' FSEL'} HMMA MUFU BRA"
    assert names(tiles[TileKind.SKIPPED]) == "MOV BRA BRA BRA"


def test_code_that_asks_of_every_tile_is_that_of_full_ones() -> None:
    tiles = paths.find_tiles(assembled(TWO_PIECES.replace(FULL_PIECE, "")))
    assert names(tiles[TileKind.FULL]) == "MOV BRA HMMA BRA HMMA MUFU BRA"
    assert tiles[TileKind.TESTED] == tiles[TileKind.FULL]


def test_storing_loop_runs_until_all_results_are_stored() -> None:
    function = assembled(TWO_PIECES)
    assert names(paths.find_paths(function, 96).epilogue) == f"{3 * 'STG STG BRA '}EXIT"
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


FORWARD = "fmha_cutlassF_f16_aligned_{}_sm70"
BACKWARD_OF_PYTORCH = "fmha_cutlassB_f16_aligned_{}_seqaligned_sm70"
SERVED: list[tuple[Any, str, int, str, list[int]]] = [
    (peer, FORWARD, 64, "64x64_rf", [2, 2]),
    (peer, FORWARD, 72, "32x128_rf", [3, 4]),
    (peer, FORWARD, 128, "32x128_rf", [4, 4]),
    (peer, FORWARD, 256, "32x128_gmem", [8, 4, 2]),
    (peer_backward, BACKWARD_OF_PYTORCH, 64, "64x64_k64", [2, 2, 2, 2, 2]),
    (peer_backward, BACKWARD_OF_PYTORCH, 72, "128x64_k128", [3, 3, 4, 4, 2, 2]),
    (peer_backward, BACKWARD_OF_PYTORCH, 128, "128x64_k128", [4, 4, 4, 4, 2, 2]),
]


@pytest.mark.parametrize(("module", "title", "headdim", "name", "products"), SERVED)
def test_pytorchs_kernel_for_a_headdim(module: Any, title: str, headdim: int, name: str, products: list[int]) -> None:
    kernel = module.serving(headdim)
    assert kernel.name == title.format(name)
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


# A loop over tiles of queries with five products in loops of their own; the loop of dq is inside one over columns,
# after a lock.
PEER = f"""
delta:  LD.E.128.SYS R4, [R2] | 4
        @P0 BRA delta | 5
query:  MOV R1, RZ | 2
qk:     {QK} | 2
        @P1 LDG.E.128.SYS R16, [R2] | 1
        @P0 BRA qk | 5
        @P2 BRA mask | 5
bias:   LDG.E.SYS R1, [R2] | 4
mask:   @P3 BRA pdo | 5
causal: FSEL R8, R8, -INF , !P3 | 2
pdo:    {PV} | 2
        @P0 BRA pdo | 5
dov:    {QK} | 2
        @P0 BRA dov | 5
column: @P4 BRA taken | 5
lock:   ATOM.E.CAS.STRONG.GPU PT, R2, [R8], R2, R3 | 2
taken:  MOV R2, RZ | 2
dsk:    {PV} | 2
        @P0 BRA dsk | 5
        STG.E.128.SYS [R2], R4 | 4
        @P0 BRA column | 5
dsq:    {PV} | 2
        @P0 BRA dsq | 5
        @P0 BRA query | 5
        EXIT | 5
"""


def peer_kernel(**changes: Any) -> Any:
    """The description of PEER."""
    labels = ("qk", "dov", "pdo", "dsq", "dsk", "column", "delta", "lock", "bias", "causal")
    qk, dov, pdo, dsq, dsk, column, delta, lock, bias, causal = at(*labels, code=PEER)
    fields: dict[str, Any] = {
        "name": "kernel", "file": "peer.cubin", "tile_m": 64, "tile_n": 32, "max_headdim": 64, "num_warps": 2,
        "registers": 128, "shared_bytes": 1024, "over_columns": (qk, dov), "over_queries": (pdo, dsq),
        "over_keys": dsk, "dq_loop": column, "delta_loop": delta, "through": frozenset({lock}),
        "around": frozenset({bias}), "causal_mask": causal,
    }  # fmt: skip
    return peer_backward.BackwardPeer(**(fields | changes))


def test_path_of_pytorchs_backward() -> None:
    path = peer_kernel().path(assembled(PEER), 64)
    columns = " BRA ATOM MOV HMMA BRA STG BRA"
    assert names(path) == f"MOV{2 * ' HMMA LDG BRA'} BRA BRA{4 * ' HMMA BRA'}{2 * columns}{2 * ' HMMA BRA'} BRA"
    assert [instruction.is_off for instruction in path if instruction.name == "LDG"] == [False, True]
    assert names(peer_kernel().delta_path(assembled(PEER))) == "LD BRA"


def test_products_of_pytorchs_backward_that_are_elsewhere_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "find_kernel", lambda file, name: assembled(PEER))
    assert peer_backward.function(peer_kernel()).name == "kernel"
    with pytest.raises(ValueError, match="kernel has its products in loops at 0x30, 0xa0, 0xc0, 0x110, 0x150"):
        peer_backward.function(peer_kernel(over_keys=0))


def test_cubins_are_taken_out_of_one_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = tmp_path / "torch.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("torch/lib/libtorch_cuda.so", "")

    def extract(command: list[str], folder: Path) -> str:
        for number, cubin in enumerate(peer._CUBINS.values()):
            (folder / f"{number}.sm_70.cubin").write_text(f"code of {cubin.kernel}")
        return ""

    monkeypatch.setenv("FASTATTENTION_CACHE", str(tmp_path / "cache" / "kernels"))
    tools.cache_folder().mkdir(parents=True)
    monkeypatch.setattr(tools, "cuobjdump", lambda: Path("cuobjdump"))
    monkeypatch.setattr(tools, "downloaded", lambda requirement: zipfile.ZipFile(wheel))
    monkeypatch.setattr(peer, "run_tool", extract)
    peer._fetch()
    for file, cubin in peer._CUBINS.items():
        assert (peer._folder() / file).read_text() == f"code of {cubin.kernel}"
    with pytest.raises(CompileError, match="its kernels were read in"):
        peer.find_kernel("attention_sm70.cubin", peer.KERNELS[0].name)


def backward_kernel(code: str, **changes: Any) -> Any:
    """A kernel whose warps each take 32 x 8 pairs of heads of 8: 8 HMMA a product."""
    fields: dict[str, Any] = {
        "title": "kv", "name": "kernel", "headdim": 8, "tile_m": 64, "tile_n": 8, "num_warps": 2, "value_parts": 1,
        "registers": 100, "shared_bytes": 40 * 1024, "stack_bytes": 0,
        "path": backward.unmasked_path(assembled(code)),
    }  # fmt: skip
    return backward.BackwardKernel(**(fields | changes))


PRODUCT = "\n".join([f"{QK} | 2"] * 8)
BACKWARD = f"""
tile:   LDS.U.64 R4, [R2] | 4
        {PRODUCT}
        @P0 BRA whole | 5
        FSEL R8, R8, -INF , !P3 | 2
whole:  MUFU.EX2 R9, R8 | 6
        {PRODUCT}
        LDG.E.128.SYS R16, [R2] | 1
        RED.E.ADD.F32.FTZ.RN.STRONG.GPU [R2], R4 | 1
        BAR.SYNC 0x0 | 5
        @P1 BRA tile | 5
        EXIT | 5
"""


def test_counts_of_a_backward_are_related_to_five_products() -> None:
    kernel = backward_kernel(BACKWARD)
    assert (kernel.pairs, kernel.products) == (256, 2)
    assert kernel.counts.issue_cycles == 4 + 16 + 5 + 6 + 16 + 1 + 1 + 5 + 5
    assert kernel.per_product(32) == 512  # tensor cycles of both
    assert kernel.per_useful(32) == 512 * 2 / 5
    assert backward_kernel(BACKWARD, value_parts=2).products == 4
    assert (kernel.shared_wavefronts, kernel.global_bytes, kernel.global_atomics) == (2, 16 + 4, 1)
    assert kernel.residents == 2  # of 40 KB each in 96


def test_issue_cycles_of_a_backward_by_what_they_are_for() -> None:
    assert backward_kernel(BACKWARD).cycles_by_kind == {
        "shared memory": 4, "matrix products": 32, "weights and their gradients": 6, "global memory": 2, "barriers": 5,
        backward.OTHERS: 10,
    }  # fmt: skip


def test_predicted_pace_of_a_backward_is_that_of_its_tensor_cores_at_best() -> None:
    code = f"tile: {PRODUCT}\n" + f"{PRODUCT}\n" * 39 + "@P1 BRA tile | 5\nEXIT | 5"
    pace = backward.pace(backward_kernel(code, tile_m=128, num_warps=4))
    assert pace.tensor_share == pytest.approx(8 / 8.38, abs=0.02)
    assert pace.cycles == pytest.approx(512 * 40 / 5 / pace.tensor_share, rel=0.001)
    assert backward.tflops(512) == pytest.approx(80 * 4 * 128 * 2 * 1.53e-3)  # the peak


def test_backward_configurations_are_those_of_plain_calls() -> None:
    configs = backward.configurations(64)
    assert {config.gradients for config in configs} == {"kv", "q"}
    assert not any(config.modifies_scores or config.drops for config in configs)


def test_configurations_are_varied_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    config = backward.configurations(64)[0]
    changed = kernels.varied(config, ["tile_n=48", "drops=1"])
    assert (changed.tile_n, changed.drops, changed.tile_m) == (48, True, config.tile_m)
    with pytest.raises(typer.Exit):
        kernels.varied(config, ["gradients=1"])
    assert "--set gradients=1: give NAME=NUMBER, where NAME is one of arch, " in capsys.readouterr().err


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
        assert run_tool([str(found)]) == run_tool([str(found.with_name("nvdisasm"))]) == "fetched\n"


def test_a_tool_that_fails_is_reported_with_its_complaint() -> None:
    with pytest.raises(CompileError, match=r"sh -c .* fails: no such cubin"):
        run_tool(["sh", "-c", "echo no such cubin >&2; exit 1"])
