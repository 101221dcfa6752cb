"""How much do warps have to issue on a V100 for gradients, in our backward kernels and in PyTorch's?

    python benchmarks/volta_backward.py                                   # the tables below, for headdim 64 and 128
    python benchmarks/volta_backward.py --headdim 64 --set q.tile_n=64    # a variation of ours; writes nothing

Needs no GPU: the machine code is disassembled, and the instructions of a warp for one unmasked tile are counted. The
first run fetches a disassembler and PyTorch's wheel (820 MB) with pip. Ours needs NVRTC 12.

A backward has five useful products: q k^T, do v^T, p^T do, ds k and ds^T q. PyTorch's kernel computes these five. Ours
are two kernels with seven products at headdim 64, and three with eight at 128. They need no atomics, and results do not
depend on the order of CTAs. So kernels are compared by useful work: a sub-core needs "512 useful tensor cycles" at the
peak rate for all five products of a tile, without anything that a kernel computes besides. Figures of our kernels add
up.

They are counts, not times. benchmarks/volta_issue_cycles.py explains the bounds by issue cycles and instructions:

- "issue cycles" add up the stalls in the control codes: the time of a single warp that never waits for memory.
- "instructions" bound a scheduler, however many warps it has.

Both flatter PyTorch. Its warps wait at some 30 barriers a tile, and for global memory before each of the five
products; a lock lets one CTA at a time add to a tile of dq; its memory fences cost 5 issue cycles each. These are
waits, not issues. It also computes delta of all queries again in every CTA, which is counted separately.

"Predicted" is the model of benchmarks/volta_model on these loops in the steady state, an SM being full. It has no
constant fitted to a kernel's speed, but there is no measurement of a backward on a V100 to judge it by. On the
published forward figures of PyTorch's kernel its errors are +1 to +19%. Not modelled: CTAs that wait for each other's
lock, memory fences, bank conflicts, prologues and epilogues, partly filled waves, the diagonal, and power limits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from harness import RESULTS, show
from pages.markdown import table
from volta_model import kernels
from volta_model.backward import (
    KINDS,
    OTHERS,
    USEFUL_PRODUCTS,
    BackwardKernel,
    Pace,
    configurations,
    ours,
    pace,
    tflops,
    theirs,
)
from volta_model.chip import V100
from volta_model.counts import UNIT

from fastattention.backends.cuda.attention.config import BackwardConfig
from fastattention.cli.bench.record import write_record
from fastattention.cli.console import errors_as_messages, fail
from fastattention.cli.machine import describe_machine

HEADDIMS = (64, 128)


@dataclass(frozen=True)
class Comparison:
    """All kernels of a head dimension."""

    headdim: int
    ours: tuple[BackwardKernel, ...]
    theirs: BackwardKernel
    paces: tuple[Pace, ...]  # of our kernels, then of theirs

    @property
    def kernels(self) -> tuple[BackwardKernel, ...]:
        """Ours, then theirs."""
        return (*self.ours, self.theirs)


def main(
    headdim: Annotated[int | None, typer.Option(help="Only this one; write nothing.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="kv.tile_n=32: change a kernel of ours.")] = None,
    output: Annotated[Path, typer.Option(help="Folder for volta_backward.json.")] = RESULTS,
) -> None:
    """Print the tables, and write them into `output`."""
    with errors_as_messages():
        if set_ and headdim is None:
            raise fail("--set changes the kernels of one head dimension: give --headdim")
        found = [compare(d, set_ or []) for d in ((headdim,) if headdim else HEADDIMS)]
        show(*(block for comparison in found for block in sections(comparison)))
        if headdim is None:
            write_record(output / "volta_backward.json", record(found))


def compare(headdim: int, changes: Sequence[str]) -> Comparison:
    """Compiles, counts and predicts. Raises CompileError."""
    configs = varied(configurations(headdim), changes)
    own, peers = tuple(ours(config) for config in configs), theirs(headdim)
    return Comparison(headdim, own, peers, tuple(pace(kernel) for kernel in (*own, peers)))


def varied(configs: list[BackwardConfig], changes: Sequence[str]) -> list[BackwardConfig]:
    """Our kernels with some fields changed: "kv.tile_n=32"."""
    named = {config.gradients: config for config in configs}
    for change in changes:
        gradients, _, rest = change.partition(".")
        if gradients not in named:
            raise fail(f"--set {change}: give KERNEL.NAME=NUMBER, where KERNEL is one of {', '.join(named)}")
        named[gradients] = kernels.varied(named[gradients], [rest])
    return list(named.values())


# Figures of one kernel.
OF_A_TILE: list[tuple[str, Callable[[BackwardKernel], float | str]]] = [
    ("tile: rows of a CTA x rows that pass by", lambda k: f"{k.tile_m}x{k.tile_n}, {k.num_warps} warps"),
    ("products", lambda k: k.products),
    ("registers", lambda k: k.registers),
    ("stack: bytes of a thread", lambda k: k.stack_bytes),
    ("shared memory: bytes of a CTA", lambda k: k.shared_bytes),
    ("warps a scheduler", lambda k: k.residents * k.num_warps / V100.num_schedulers),
    ("HMMA", lambda k: k.counts.hmma),
    ("instructions", lambda k: k.counts.instructions),
    ("issue cycles", lambda k: k.counts.issue_cycles),
    *(
        (f"{name} of {width} bytes a thread", lambda k, key=f"{name} {width}": k.counts.accesses.get(key, 0))
        for name, widths in (("LDS", (16, 8, 4, 2)), ("STS", (16, 8, 4, 2)), ("LDG", (16, 4)), ("STG", (16,)))
        for width in widths
    ),
    ("local memory: loads and stores", lambda k: sum(i.name in ("LDL", "STL") for i in k.path)),
    ("global atomics", lambda k: k.global_atomics),
    ("MUFU: exponentials", lambda k: k.counts.exponentials),
    ("shuffles", lambda k: k.counts.shuffles),
    ("barriers", lambda k: k.counts.barriers),
    (f"instructions for {UNIT} tensor cycles of its products", lambda k: k.per_product(k.counts.instructions)),
    (f"issue cycles for {UNIT} tensor cycles of its products", lambda k: k.per_product(k.counts.issue_cycles)),
]

# Counts that add up over kernels, for UNIT useful tensor cycles.
OF_USEFUL_WORK: list[tuple[str, Callable[[BackwardKernel], float]]] = [
    ("tensor cycles", lambda k: 2 * k.counts.hmma),
    ("instructions", lambda k: k.counts.instructions),
    ("issue cycles", lambda k: k.counts.issue_cycles),
    *((f"issue cycles: {kind}", lambda k, kind=kind: k.cycles_by_kind[kind]) for kind in (*KINDS, OTHERS)),
    ("issue cycles of delta, outside the loop", lambda k: k.delta_issue_cycles),
    ("shared memory: wavefronts of four sub-cores", lambda k: V100.num_schedulers * k.shared_wavefronts),
    ("global memory: bytes of a thread", lambda k: k.global_bytes),
]

Row = tuple[str, list[float | str]]


def tables(comparison: Comparison) -> list[tuple[str, list[str], list[Row]]]:
    """(title, headings, rows) of the three tables of a head dimension."""
    names = [kernel.title for kernel in comparison.kernels]
    with_sum = [*names[:-1], "ours", names[-1], "PyTorch / ours"]
    return [
        (
            f"Heads of {comparison.headdim}: one warp, once around the loop",
            names,
            [(title, [value(kernel) for kernel in comparison.kernels]) for title, value in OF_A_TILE],
        ),
        (
            f"Heads of {comparison.headdim}: counts for {UNIT} useful tensor cycles",
            with_sum,
            [
                (title, _summed([kernel.per_useful(value(kernel)) for kernel in comparison.kernels]))
                for title, value in OF_USEFUL_WORK
            ],
        ),
        (f"Heads of {comparison.headdim}: predicted", with_sum, _predicted(comparison.paces)),
    ]


def _summed(values: Sequence[float]) -> list[float | str]:
    """Values of our kernels and their sum, that of PyTorch's kernel, and its ratio to the sum."""
    total = sum(values[:-1])
    return [*values[:-1], total, values[-1], f"{values[-1] / total:.2f}" if total else ""]


def _predicted(paces: Sequence[Pace]) -> list[Row]:
    """Rows of the model. Useful TFLOPS of a single kernel of ours would count products that others compute."""
    cycles = _summed([one.cycles for one in paces])
    total, theirs_ = sum(one.cycles for one in paces[:-1]), paces[-1].cycles
    blank = [""] * (len(paces) - 1)
    return [
        (f"cycles of an SM for {UNIT} useful tensor cycles", cycles),
        (
            "useful TFLOPS of the loop",
            [*blank, tflops(total), tflops(theirs_), f"{tflops(total) / tflops(theirs_):.2f}"],
        ),
        ("tensor cores busy, with all products", _each(f"{one.tensor_share:.0%}" for one in paces)),
        ("shared memory busy", _each(f"{one.shared_share:.0%}" for one in paces)),
        ("issue slots used", _each(f"{one.issue_share:.0%}" for one in paces)),
        ("tensor cores idle for", _each(map(_reasons, paces))),
    ]


def _each(values: Iterable[str]) -> list[float | str]:
    """Values of each kernel, where neither a sum nor a ratio makes sense."""
    *own, theirs_ = values
    return [*own, "", theirs_, ""]


def _reasons(one: Pace) -> str:
    largest = sorted(one.lost_shares.items(), key=lambda item: -item[1])[:3]
    return ", ".join(f"{name} {share:.0%}" for name, share in largest)


def sections(comparison: Comparison) -> Iterator[str]:
    """The tables in Markdown, each under its title."""
    for title, columns, rows in tables(comparison):
        yield f"## {title}"
        yield table(["", *columns], [[name, *map(kernels.cell, values)] for name, values in rows])


def record(found: Sequence[Comparison]) -> dict[str, Any]:
    """All figures, for JSON."""
    machine = describe_machine()
    machine["versions"] |= kernels.versions()
    return {
        "machine": machine,
        "tensor_cycles": UNIT,
        "useful_products": USEFUL_PRODUCTS,
        "headdims": [_record(comparison) for comparison in found],
    }


def _record(comparison: Comparison) -> dict[str, Any]:
    def described(kernel: BackwardKernel, predicted: Pace) -> dict[str, Any]:
        return {
            "title": kernel.title,
            "name": kernel.name,
            "tile": {title: value(kernel) for title, value in OF_A_TILE},
            "useful": {title: kernel.per_useful(value(kernel)) for title, value in OF_USEFUL_WORK},
            "counts": asdict(kernel.counts),
            "predicted": asdict(predicted),
        }

    every = [described(*both) for both in zip(comparison.kernels, comparison.paces, strict=True)]
    sums = {title: sum(one["useful"][title] for one in every[:-1]) for title, _ in OF_USEFUL_WORK}
    cycles = sum(one.cycles for one in comparison.paces[:-1])
    return {
        "headdim": comparison.headdim,
        "ours": every[:-1],
        "pytorch": every[-1],
        "ours_together": {"useful": sums, "predicted_cycles": cycles, "predicted_tflops": tflops(cycles)},
        "pytorch_predicted_tflops": tflops(comparison.paces[-1].cycles),
        "ratio": {
            "issue_cycles": every[-1]["useful"]["issue cycles"] / sums["issue cycles"],
            "instructions": every[-1]["useful"]["instructions"] / sums["instructions"],
            "predicted": comparison.paces[-1].cycles / cycles,
        },
    }


if __name__ == "__main__":
    typer.run(main)
