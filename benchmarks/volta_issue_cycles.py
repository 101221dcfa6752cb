"""How much does a warp have to issue on a V100 while its tensor cores work, in our kernels and in PyTorch's?

    python benchmarks/volta_issue_cycles.py                          # the table below, for headdim 64, 128 and 256
    python benchmarks/volta_issue_cycles.py --cubin FILE             # any kernel for sm_70 that has one main loop
    python benchmarks/volta_issue_cycles.py --headdim 64 --set tile_n=32 --set num_warps=8      # a variation of ours

Needs no GPU: the machine code is disassembled and the instructions of one tile of keys are counted along the steady
path: nothing is masked, and no row's maximum rises. The first run fetches a disassembler and PyTorch's wheel (820 MB)
with pip and keeps the few megabytes it needs of them. Ours needs NVRTC 12.

Figures are for 512 tensor cycles of a sub-core, the time of a warp's 256 HMMA instructions at the peak rate. So kernels
with tiles of different sizes can be compared. They are counts, not times:

- "issue cycles" add up the stalls in the control codes: the compiler's own schedule of one warp that never waits for
  memory, a barrier or another warp. Alone on its scheduler, the warp cannot be faster. Two warps fill each other's
  gaps, so the sum is no bound for a multiprocessor.
- "instructions" are such a bound: a scheduler issues one a cycle, so above 512 the tensor cores must idle, however many
  warps there are.

PyTorch's kernel runs its products in loops of their own with a barrier in each round, and the softmax between them. "Q
K^T" and "P V" are these loops. Ours is straight-line code, in which a product counts from its first HMMA to its last,
with all instructions between: much of the softmax is inside "P V". "Both products" therefore flatters PyTorch. The
whole tile is the same work in both: all instructions from one tile of keys to the next, with the softmax, the rescaling
of results (PyTorch always does, ours only when a maximum rose), loads of the next tile, and barriers. Loads that
PyTorch's loops switch off in their last trip are issued but not counted as loads.

A causal call runs the same kernel as one that is not, ours and PyTorch's alike, and the same path for tiles below the
diagonal; "whole tile, masked" is a tile that the diagonal crosses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from harness import RESULTS, publish, show
from pages.markdown import table
from volta_model import kernels, tools
from volta_model.counts import UNIT, Tile, count, split
from volta_model.flow import main_loop
from volta_model.launch import TileKind
from volta_model.paths import find_tiles
from volta_model.sass import Function

from fastattention.backends.cuda.attention.config import KernelConfig
from fastattention.cli.console import errors_as_messages
from fastattention.cli.machine import describe_machine

HEADDIMS = (64, 128, 256)


@dataclass(frozen=True)
class Kernel:
    """A kernel's counts, and the resources of a multiprocessor that it takes."""

    title: str
    name: str
    tile: str  # query rows x keys, warps
    function: Function
    full: Tile
    masked: Tile
    useful: float = 1.0  # share of its tensor cycles that any division of the work needs


def main(
    cubin: Annotated[Path | None, typer.Option(help="Count this kernel instead, and write nothing.")] = None,
    headdim: Annotated[int | None, typer.Option(help="Count our kernel for it, and write nothing.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="tile_n=32: change its configuration.")] = None,
    output: Annotated[Path, typer.Option(help="Folder for volta_issue_cycles.json.")] = RESULTS,
) -> None:
    """Print the table, and write it into `output`."""
    with errors_as_messages():
        if cubin is not None:
            show(counts([of_function(cubin.name, tools.disassemble(cubin)[0])]))
            return
        if headdim is not None:
            show(counts([ours(kernels.varied(kernels.configuration(headdim), set_ or []))]))
            return
        found = [kernel for d in HEADDIMS for kernel in (ours(kernels.configuration(d)), theirs(d))]
        publish(output / "volta_issue_cycles.json", record(found), counts(found))


def of_function(title: str, function: Function) -> Kernel:
    """The counts of a kernel whose paths can be told by its branches, like ours."""
    masked = split(main_loop(function), find_tiles(function)[TileKind.MASKED])
    return Kernel(title, function.name, "", function, count(function), masked)


def ours(config: KernelConfig) -> Kernel:
    """Our kernel of a configuration, compiled. Raises CompileError."""
    function, _ = kernels.compiled(config)
    kernel = of_function(f"d {config.headdim}, ours", function)
    tile = f"{config.tile_m}x{config.tile_n}, {config.num_warps} warps"
    # CTAs that share the columns of values each compute all products with keys.
    values = config.headdim_v * config.num_value_parts
    useful = (config.headdim + values) / (config.headdim * config.num_value_parts + values)
    return dataclasses.replace(kernel, name=config.name, tile=tile, useful=useful)


def theirs(headdim: int) -> Kernel:
    """The kernel that PyTorch runs. Raises CompileError when it cannot be had."""
    found = kernels.serving(headdim)
    kernel, loop = found.kernel, main_loop(found.function)
    tile = f"{kernel.tile_m}x{kernel.tile_n}, {kernel.num_warps} warps"
    full, masked = split(loop, found.full), split(loop, found.masked)
    return Kernel(f"d {headdim}, PyTorch", kernel.name, tile, found.function, full, masked)


def _scaled(part: str, what: str) -> Callable[[Kernel], float]:
    """A count of a part of a full tile, for UNIT tensor cycles."""
    return lambda kernel: kernel.full.scaled(getattr(getattr(kernel.full, part), what))


def _products(what: str) -> Callable[[Kernel], float]:
    return lambda kernel: _scaled("qk", what)(kernel) + _scaled("pv", what)(kernel)


def _accesses(kind: str) -> Callable[[Kernel], float]:
    return lambda kernel: kernel.full.scaled(kernel.full.whole.accesses.get(kind, 0))


def _stack_accesses(kernel: Kernel) -> float:
    return sum(instruction.name in ("LDL", "STL") for instruction in kernel.function.instructions)


# Rows of each kernel. From the fourth on, for UNIT tensor cycles.
ROWS: list[tuple[str, Callable[[Kernel], float | str | None]]] = [
    ("tile: query rows x keys", lambda kernel: kernel.tile or None),
    ("registers", lambda kernel: kernel.function.registers),
    ("stack: bytes of a thread", lambda kernel: kernel.function.stack_bytes),
    ("stack: loads and stores in all the code", _stack_accesses),
    ("issue cycles: Q K^T", _scaled("qk", "issue_cycles")),
    ("issue cycles: P V", _scaled("pv", "issue_cycles")),
    ("issue cycles: both products", _products("issue_cycles")),
    ("issue cycles: rest", _scaled("rest", "issue_cycles")),
    ("issue cycles: whole tile", _scaled("whole", "issue_cycles")),
    ("issue cycles: whole tile, masked", lambda kernel: kernel.masked.scaled(kernel.masked.whole.issue_cycles)),
    ("issue cycles: whole tile, by useful tensor cycles", lambda k: _scaled("whole", "issue_cycles")(k) / k.useful),
    ("instructions: Q K^T", _scaled("qk", "instructions")),
    ("instructions: P V", _scaled("pv", "instructions")),
    ("instructions: both products", _products("instructions")),
    ("instructions: rest", _scaled("rest", "instructions")),
    ("instructions: whole tile", _scaled("whole", "instructions")),
    ("HMMA", _scaled("whole", "hmma")),
    ("shuffles", _scaled("whole", "shuffles")),
    ("MUFU: exponentials", _scaled("whole", "exponentials")),
    *(
        (f"{name} of {width} bytes a thread", _accesses(f"{name} {width}"))
        for name in ("LDS", "STS")
        for width in (16, 8, 4)
    ),
    ("atomics in shared memory", _scaled("whole", "shared_atomics")),
    ("LDG of 16 bytes a thread", _accesses("LDG 16")),
    ("STG of 16 bytes a thread", _accesses("STG 16")),
    ("barriers", _scaled("whole", "barriers")),
]


def cells(value: float | str | None) -> str:
    """A value as text of the table."""
    return "unknown" if value is None else kernels.cell(value)


def counts(columns: list[Kernel]) -> str:
    """The table in Markdown."""
    rows = [[title, *(cells(value(kernel)) for kernel in columns)] for title, value in ROWS]
    return table([f"for {UNIT} tensor cycles", *(kernel.title for kernel in columns)], rows)


def record(columns: list[Kernel]) -> dict[str, object]:
    """All counts, for one tile of keys and one warp."""

    def described(kernel: Kernel) -> dict[str, object]:
        tiles = {"tile": asdict(kernel.full), "masked_tile": asdict(kernel.masked)}
        table = {title: value(kernel) for title, value in ROWS}
        return {"title": kernel.title, "name": kernel.name, "table": table, **tiles}

    machine = describe_machine()
    machine["versions"] |= kernels.versions()
    return {"machine": machine, "tensor_cycles": UNIT, "kernels": [described(kernel) for kernel in columns]}


if __name__ == "__main__":
    typer.run(main)
