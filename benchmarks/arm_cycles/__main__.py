"""How many cycles do the kernels for 64-bit Arm take? What limits them?

    python benchmarks/arm_cycles
    python benchmarks/arm_cycles --isas neon --output build/arm            # one instruction set
    python benchmarks/arm_cycles --wheel torch-2.9.1-...-aarch64.whl       # torch's matrix products too

Needs no Arm processor. Our kernels are compiled with the build's flags and run once under QEMU, which records the
instructions that they execute. llvm-mca counts the cycles of these on its models of processors. A product is one panel
of 48 rows and the panel's columns, at heads of 128; a decode is 32 keys of a head of 128. "Loop" is one iteration of
the innermost loop that has most of the arithmetic, and "call" is everything that was executed, from first to last.

The models let all loads hit the L1 cache and predict all branches. So these are predictions, and bounds from below.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import RESULTS, publish, run_tool
from pages import arm_cycles

from arm_cycles import loops, mca, peers, trace
from arm_cycles.assembly import OBJDUMP, Instruction
from arm_cycles.processors import PORTABLE, PROCESSORS, Processor
from fastattention.cli.console import errors_as_messages
from fastattention.cli.machine import describe_machine


def main(
    isas: Annotated[str, typer.Option(help="Instruction sets of ours.")] = f"neon,neon_fp16,neon_bf16,{PORTABLE}",
    wheel: Annotated[Path | None, typer.Option(help="torch's wheel for 64-bit Arm; without it no peers.")] = None,
    output: Annotated[Path, typer.Option(help="Folder for arm_cycles.json.")] = RESULTS,
) -> None:
    """Print the tables, and write arm_cycles.json into `output`."""
    with errors_as_messages():
        calls = [record for isa in isas.split(",") for record in of_isa(isa)]
        others = list(of_wheel(wheel)) if wheel else []
        machine = describe_machine()
        machine["versions"] |= versions(wheel)
        machine["command"] = machine["command"].replace(str(wheel), wheel.name) if wheel else machine["command"]
    figures = {"machine": machine, "processors": described(), "calls": calls, "peers": others}
    publish(output / "arm_cycles.json", figures, *arm_cycles.blocks(figures))


def described() -> list[dict[str, Any]]:
    """The processors, as JSON types."""
    return [
        {"name": one.name, "chip": one.chip, "ghz": one.ghz, "isa": one.isa, "product_reach": one.product_reach}
        for one in PROCESSORS
    ]


def versions(wheel: Path | None) -> dict[str, str]:
    """The versions of tools, and of the torch that peers are from."""
    found = {
        "llvm-mca": mca.version(mca.program()),
        "GCC": run_tool([trace.COMPILER, "-dumpfullversion"]).strip(),
        "binutils": run_tool([OBJDUMP, "--version"]).split("\n")[0].split()[-1],
    }
    return found | ({"torch for 64-bit Arm": wheel.name.split("-")[1]} if wheel else {})


def of_isa(isa: str) -> Iterator[dict[str, Any]]:
    """The figures of one instruction set, on each processor that has it."""
    with tempfile.TemporaryDirectory() as folder:
        traces = trace.trace(trace.compile_set(isa, Path(folder)))
    for call in trace.all_calls():
        if call.name not in traces:
            continue
        for processor in PROCESSORS:
            if isa in (PORTABLE, processor.isa):
                yield {"isa": isa, **count(call, traces[call.name], processor)}


def count(call: trace.Call, executed: list[Instruction], processor: Processor) -> dict[str, Any]:
    """One call on one processor."""
    body = loops.main_loop(executed)
    products = sum(one.products for one in executed)
    work = call.work or products
    return {
        "kind": call.kind,
        "dtype": call.dtype,
        "rows": call.rows,
        "processor": processor.name,
        "loop": of_loop(body, processor.name) | {"work": work * sum(one.products for one in body) / products},
        "call": {
            "instructions": len(executed),
            "cycles": mca.once(executed, processor.name),
            "work": work,
        },
    }


def of_loop(body: loops.Code, processor: str) -> dict[str, Any]:
    """One iteration of a loop."""
    counted = mca.loop(body, processor)
    multiplies = [one for one in body if one.products]
    return {
        "instructions": len(body),
        "cycles": round(counted.cycles, 3),
        "multiply_cycles": round(mca.throughput(multiplies, processor), 3),
        "dispatch_cycles": round(counted.dispatch, 3),
        "unit_cycles": {name: round(cycles, 2) for name, cycles in counted.units.items()},
        "limit": counted.limit,
        "stack_accesses": sum(one.uses_stack for one in body),
    }


def of_wheel(wheel: Path) -> Iterator[dict[str, Any]]:
    """The figures of torch's matrix products."""
    for peer, body in peers.loops(wheel):
        name = peer.symbol.rpartition(":")[2]
        for processor in peer.processors:
            yield {
                "library": peer.library,
                "kernel": name,
                "dtype": peer.dtype,
                "processor": processor,
                "loop": of_loop(body, processor),
            }


if __name__ == "__main__":
    typer.run(main)
