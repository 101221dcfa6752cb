"""llvm-mca, which runs code on a model of a processor. Loads hit the L1 cache and branches are predicted."""

from __future__ import annotations

import json
import re
import shutil
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from harness import run_tool

from fastattention.errors import CompileError

from .assembly import Instruction

_VERSIONS = range(15, 31)
_ITERATIONS = 100, 300  # the difference is the pace of a loop that has begun
_EXTENSIONS = "-mattr=+dotprod,+fullfp16,+bf16,+i8mm"
_CLOSE = 0.95  # a bound of at least this share of the cycles is what limits a loop
_WAITING = 0.1  # a share of cycles with less is not what limits a loop


@dataclass(frozen=True)
class Counted:
    """One iteration of a loop on one processor."""

    cycles: float
    dispatch: float  # cycles that the width of dispatch alone would take
    units: dict[str, float]  # cycles that each unit is busy
    dependencies: float  # share of all cycles in which waiting for registers held up more instructions

    @property
    def limit(self) -> str:
        """What limits the loop."""
        unit, busy = max(self.units.items(), key=lambda item: item[1], default=("", 0.0))
        if busy >= _CLOSE * self.cycles and busy > self.dispatch:
            return f"unit {unit}"
        # An instruction's micro-operations are dispatched in one cycle, so that the width is not always used up.
        return "latency" if self.dispatch < _CLOSE * self.cycles and self.dependencies >= _WAITING else "dispatch"


@cache
def program() -> str:
    """The newest llvm-mca there is. Raises CompileError."""
    names = ["llvm-mca", *(f"llvm-mca-{version}" for version in _VERSIONS)]
    found = [path for name in names if (path := shutil.which(name))]
    if not found:
        raise CompileError("llvm-mca is not installed: install llvm (Debian, Ubuntu: apt-get install llvm)")
    return max(found, key=lambda path: tuple(map(int, version(path).split("."))))


@cache
def version(path: str) -> str:
    """Its version, as in "22.1.8"."""
    found = re.search(r"version (\d+[\d.]*)", run_tool([path, "--version"]))
    return found[1] if found else "0"


def loop(code: Sequence[Instruction], processor: str) -> Counted:
    """One iteration of a loop that has been running for a while."""
    few, many = (_analyse(code, processor, number) for number in _ITERATIONS)
    summary, iterations = many["SummaryView"], _ITERATIONS[1] - _ITERATIONS[0]
    return Counted(
        (summary["TotalCycles"] - few["SummaryView"]["TotalCycles"]) / iterations,
        summary["TotaluOps"] / _ITERATIONS[1] / summary["DispatchWidth"],
        _units(many),
        many["BottleneckAnalysis"].get("RegisterDependencyCycles", 0) / summary["TotalCycles"],
    )


def once(code: Sequence[Instruction], processor: str) -> int:
    """Cycles of code that runs once."""
    options = ("-iterations=1", "-all-views=false", "-summary-view")
    found = re.search(r"Total Cycles: +(\d+)", _run(_text(code), processor, options))
    if found is None:
        raise CompileError(f"llvm-mca does not know code for {processor}")
    return int(found[1])


def throughput(code: Sequence[Instruction], processor: str) -> float:
    """Cycles of code if it waits for nothing but its busiest resource."""
    return float(_analyse(code, processor, 1)["SummaryView"]["BlockRThroughput"]) if code else 0.0


def _units(region: dict[str, Any]) -> dict[str, float]:
    """Cycles of each unit in an iteration. Equal units share a name, and the busiest counts."""
    cycles: dict[str, float] = defaultdict(float)
    total = len(region["Instructions"])  # the index of the sum of all
    for one in region["ResourcePressureView"]["ResourcePressureInfo"]:
        if one["InstructionIndex"] == total:
            name = region["resources"][one["ResourceIndex"]].split(".")[0]
            name = name.partition("Unit")[2] or name
            cycles[name] = max(cycles[name], one["ResourceUsage"])
    return dict(cycles)


def _analyse(code: Sequence[Instruction], processor: str, iterations: int) -> dict[str, Any]:
    options = (f"-iterations={iterations}", "-bottleneck-analysis", "-json")
    found = json.loads(_run(_text(code), processor, options))
    region: dict[str, Any] = found["CodeRegions"][0]
    region["resources"] = found["TargetInfo"]["Resources"]
    return region


def _text(code: Sequence[Instruction]) -> str:
    return "".join(f"{line}\n" for one in code for line in one.lines)


@cache  # instruction sets share loops
def _run(text: str, processor: str, options: tuple[str, ...]) -> str:
    return run_tool([program(), "-mtriple=aarch64-linux-gnu", f"-mcpu={processor}", _EXTENSIONS, *options], text=text)
