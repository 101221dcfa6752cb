"""Instructions that a warp issues for a tile of keys, relative to the work of the tensor cores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from .flow import Loop, main_loop, steady_path
from .sass import Function, Instruction

CYCLES_PER_HMMA = 2  # cycles of a sub-core's tensor cores: an instruction is one of four steps of an 8x8x4 product
UNIT = 512  # tensor cycles that figures are scaled to
_MEMORY = {"LDS", "STS", "LDG", "STG", "LDL", "STL"}


@dataclass(frozen=True)
class Counts:
    """Counts of a section of instructions, as one warp executes it."""

    instructions: int
    issue_cycles: int  # sum of the stalls in the control codes
    hmma: int
    shuffles: int
    exponentials: int  # and other results of the special function unit
    barriers: int
    shared_atomics: int
    accesses: Mapping[
        str, int
    ]  # "LDS 16": loads from shared memory, 16 bytes a thread; LDL and STL access the stack; without switched-off ones

    @classmethod
    def of(cls, instructions: Iterable[Instruction]) -> Counts:
        """Counts a section."""
        path = list(instructions)
        names = Counter(instruction.name for instruction in path)
        accesses = Counter(f"{i.name} {i.width}" for i in path if i.name in _MEMORY and not i.is_off)
        return cls(
            instructions=len(path),
            issue_cycles=sum(instruction.stall for instruction in path),
            hmma=names["HMMA"],
            shuffles=names["SHFL"],
            exponentials=names["MUFU"],
            barriers=names["BAR"],
            shared_atomics=names["ATOMS"],
            accesses=dict(sorted(accesses.items(), key=lambda item: (item[0].split()[0], -int(item[0].split()[1])))),
        )


@dataclass(frozen=True)
class Tile:
    """A tile of keys in three parts."""

    qk: Counts  # inner products of queries and keys
    rest: Counts
    pv: Counts  # weights times values
    whole: Counts

    @property
    def tensor_cycles(self) -> int:
        """Cycles of a sub-core's tensor cores for one warp."""
        return CYCLES_PER_HMMA * self.whole.hmma

    def scaled(self, count: float) -> float:
        """A count of the tile, or of a part of it, for UNIT tensor cycles of the whole tile."""
        return count * UNIT / self.tensor_cycles


def count(
    function: Function,
    trips: Mapping[int, int] | None = None,
    through: Collection[int] = (),
    around: Collection[int] = (),
) -> Tile:
    """Counts the steady path of a kernel's main loop (flow.steady_path, which explains the arguments).

    The product with keys consists of the HMMA whose second operand is laid out by columns, the product with values of
    the others. Where all HMMA of a product are in inner loops, its part is these whole loops. Otherwise it is all
    instructions from its first HMMA to its last, which for values often include the exponentials. Where the two parts
    overlap they cannot be told apart, and all is `rest`. Raises ValueError for a kernel without such a loop.
    """
    loop = main_loop(function)
    return split(loop, steady_path(loop, trips or {}, through, around))


def split(loop: Loop, path: list[Instruction]) -> Tile:
    """Counts a path through a main loop, by its parts."""
    sections: dict[str, list[Instruction]] = {"qk": [], "pv": [], "rest": []}
    for instruction, part in zip(path, _parts(loop, path), strict=True):
        sections[part].append(instruction)
    counts = {part: Counts.of(section) for part, section in sections.items()}
    return Tile(counts["qk"], counts["rest"], counts["pv"], Counts.of(path))


def _product(hmma: Instruction) -> str:
    """The product of an HMMA: "HMMA... R4, R8.ROW, R12.COL, R4" is with keys."""
    return "qk" if hmma.text.split(", ")[2].endswith(".COL") else "pv"


def _parts(loop: Loop, path: list[Instruction]) -> list[str]:
    """The part that each instruction belongs to."""
    looping = _innermost(loop)
    parts = ["rest"] * len(path)
    for product in ("qk", "pv"):
        places = [n for n, i in enumerate(path) if i.name == "HMMA" and _product(i) == product]
        headers = {looping.get(path[place].address) for place in places}
        if None not in headers:
            own = [n for n, i in enumerate(path) if looping.get(i.address) in headers]
        else:
            own = list(range(places[0], places[-1] + 1))
        if any(parts[n] != "rest" for n in own):
            return ["rest"] * len(path)
        for n in own:
            parts[n] = product
    return parts


def _innermost(loop: Loop) -> dict[int, int]:
    """For the address of each instruction in an inner loop: the header of the smallest that holds it."""
    headers: dict[int, int] = {}
    for inner in loop.nested():
        for block in inner.blocks.values():
            headers |= dict.fromkeys((instruction.address for instruction in block.instructions), inner.header)
    return headers
