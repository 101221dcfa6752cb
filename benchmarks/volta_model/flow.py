"""The control flow of a kernel: basic blocks, loops, and the path that a warp takes for most tiles of keys.

A block is named by the address of its first instruction, a loop by the address of its header.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from graphlib import TopologicalSorter

from .sass import INSTRUCTION_BYTES, Function, Instruction

# CALL returns to the next instruction, and BSYNC meets the warp's other threads at the next instruction: neither ends
# a block.
_ENDS = {"BRA", "BRX", "EXIT", "JMP", "RET"}
END = -1  # where a warp goes from an EXIT
_GOAL = -2  # the end of the path that is looked for
_TRAFFIC = {"LDG", "STG", "STS"}

Way = tuple[Instruction, ...]


@dataclass(frozen=True)
class Block:
    """Instructions that run one after another, and the blocks where a warp can go from there."""

    address: int
    instructions: Way
    successors: tuple[int, ...]


@dataclass(frozen=True)
class Loop:
    """Blocks that can all reach each other. The only way in is the header."""

    header: int
    blocks: Mapping[int, Block]
    inner: tuple[Loop, ...]  # directly inside, by address

    def nested(self) -> Iterator[Loop]:
        """All loops inside, each before those inside it."""
        for loop in self.inner:
            yield loop
            yield from loop.nested()

    @property
    def hmma(self) -> int:
        """Tensor-core instructions of the body, inner loops once."""
        return sum(count_hmma(block.instructions) for block in self.blocks.values())


def count_hmma(instructions: Iterable[Instruction]) -> int:
    """Tensor-core instructions; each keeps the tensor cores of a sub-core busy for two cycles."""
    return sum(instruction.name == "HMMA" for instruction in instructions)


def blocks(function: Function) -> list[Block]:
    """Basic blocks, by address."""
    code = function.instructions
    leaders = {code[0].address}
    for instruction in code:
        if instruction.name in _ENDS:
            leaders.add(instruction.address + INSTRUCTION_BYTES)
            if instruction.target is not None:
                leaders.add(instruction.target)
    starts = [index for index, instruction in enumerate(code) if instruction.address in leaders]
    parts = [code[start:stop] for start, stop in zip(starts, [*starts[1:], len(code)], strict=True)]
    return [Block(part[0].address, part, _successors(part[-1], code[-1].address)) for part in parts]


def _successors(last: Instruction, end: int) -> tuple[int, ...]:
    after = last.address + INSTRUCTION_BYTES
    following = (after,) if after <= end else ()
    if last.name not in _ENDS:
        return following
    leaves = last.name in ("EXIT", "RET")
    targets = (END,) if leaves else () if last.target is None else (last.target,)
    # A branch may name a second condition, "@!P4 BRA !P3, 0xe940", or ask whether the threads of the warp have parted.
    conditional = last.predicate is not None or ", " in last.text or last.opcode == "BRA.DIV"
    return tuple(dict.fromkeys(targets + following)) if conditional else targets


def loops(function: Function) -> list[Loop]:
    """The outermost loops, by address. Raises ValueError for a loop with two ways in."""
    graph = {block.address: block for block in blocks(function)}
    return _loops(graph, function.instructions[0].address, None)


def loops_after(function: Function, loop: Loop) -> list[Loop]:
    """The outermost loops that a warp can come to when it has left a loop, by address."""
    edges: dict[int, tuple[int, ...]] = {block.address: block.successors for block in blocks(function)}
    reached = _reachable(edges | {END: ()}, loop.header) - set(loop.blocks)
    return [other for other in loops(function) if other.header in reached]


def _loops(graph: Mapping[int, Block], entry: int, header: int | None) -> list[Loop]:
    """Loops of a part of a function that is entered at `entry`; edges to `header` are left out."""
    edges = {a: {s for s in block.successors if s in graph and s != header} for a, block in graph.items()}
    found = []
    for part in _cycles(edges):
        entries = {s for a in edges if a not in part for s in edges[a] if s in part} | ({entry} & part)
        if len(entries) > 1:
            raise ValueError(f"the loop at {min(part):#x} has ways in at {', '.join(map(hex, sorted(entries)))}")
        first = min(entries or part)
        body = {address: graph[address] for address in sorted(part)}
        found.append(Loop(first, body, tuple(_loops(body, first, first))))
    return sorted(found, key=lambda loop: loop.header)


def _cycles(edges: Mapping[int, Collection[int]]) -> list[set[int]]:
    """The largest sets of blocks that can all reach each other, and themselves."""
    reachable = {address: _reachable(edges, address) for address in edges}
    found: list[set[int]] = []
    for address, reached in reachable.items():
        if address in reached and not any(address in part for part in found):
            found.append({other for other in reached if address in reachable[other]})
    return found


def _reachable(edges: Mapping[int, Collection[int]], start: int) -> set[int]:
    seen: set[int] = set()
    waiting = [start]
    while waiting:
        new = [address for address in edges[waiting.pop()] if address not in seen]
        seen.update(new)
        waiting.extend(new)
    return seen


def main_loop(function: Function) -> Loop:
    """The loop over tiles of keys: the outermost one with the most HMMA; on a tie, the shortest.

    Raises ValueError when no loop has any.
    """
    found = [loop for loop in loops(function) if loop.hmma]
    if not found:
        raise ValueError(f"{function.name} has no loop with HMMA instructions")
    return max(found, key=lambda loop: (loop.hmma, -sum(len(block.instructions) for block in loop.blocks.values())))


def tile_loop(function: Function) -> Loop:
    """The loop over tiles inside the main loop, where that goes over heads or rows: the innermost one with all HMMA.

    Raises ValueError when no loop has any.
    """
    loop = main_loop(function)
    while within := [inner for inner in loop.inner if inner.hmma == loop.hmma]:
        loop = within[0]
    return loop


@dataclass(frozen=True)
class Choice:
    """The criteria that choose among the paths of a warp."""

    trips: Mapping[int, int]  # of loops, by header; those without HMMA may be left out inside the main loop: once
    through: frozenset[int] = frozenset()  # blocks that must be on the way
    around: frozenset[int] = frozenset()  # blocks that must not
    busiest: bool = True  # whether accesses that move tiles count for more than brevity

    def rank(self, way: Way) -> tuple[int, int, int, int]:
        """The more the better: blocks of `through`, HMMA, accesses that move tiles, and fewer instructions."""
        passed = sum(instruction.address in self.through for instruction in way)
        traffic = self.busiest * sum(instruction.name in _TRAFFIC for instruction in way)
        return passed, count_hmma(way), traffic, -len(way)


def steady_path(
    loop: Loop, trips: Mapping[int, int], through: Collection[int] = (), around: Collection[int] = ()
) -> list[Instruction]:
    """The instructions of a warp for one tile of keys, neither the first nor the last, with nothing masked.

    The candidates are paths once around the loop with all HMMA. Among these it takes those that load and store most
    (the next tile), and then the shortest. Where that does not identify the path, `through` names blocks on it and
    `around` blocks that are not.

    trips: how often the inner loops run, by header; needed for those with HMMA, once for others that are not named.
    Raises ValueError when there is no such way.
    """
    choice = Choice(trips, frozenset(through), frozenset(around))
    return _checked(_way(loop.blocks, loop.inner, loop.header, loop.header, choice), choice)


def prologue(function: Function, loop: Loop, trips: Mapping[int, int] | None = None) -> list[Instruction]:
    """The instructions of a warp before the main loop: the shortest path to it, for a plain call.

    Raises ValueError when it passes a loop that `trips` does not name.
    """
    graph = {block.address: block for block in blocks(function)}
    choice = Choice(trips or {}, busiest=False)
    others = loops(function)
    way = _checked(_way(graph, others, function.instructions[0].address, loop.header, choice), choice)
    return _counted(way, others, choice)


def epilogue(function: Function, loop: Loop, trips: Mapping[int, int] | None = None) -> list[Instruction]:
    """The instructions of a warp after the main loop: the shortest path to an EXIT among those that store most.

    Raises ValueError when it passes a loop that `trips` does not name.
    """
    graph = {block.address: block for block in blocks(function) if block.address not in loop.blocks}
    choice = Choice(trips or {})
    others = [other for other in loops(function) if other.header != loop.header]
    ways = [_checked(_way(graph, others, start, END, choice), choice) for start in _exits(loop)]
    return _counted(max(ways, key=lambda way: choice.rank(tuple(way))), others, choice)


def _counted(way: list[Instruction], others: Iterable[Loop], choice: Choice) -> list[Instruction]:
    """`way`, with a check that all loops on it have given trip counts."""
    passed = {instruction.address for instruction in way}
    for loop in others:
        for each in (loop, *loop.nested()):
            if each.header in passed and each.header not in choice.trips:
                raise ValueError(f"how often does the loop at {each.header:#x} run? It is outside the main loop")
    return way


def _checked(way: Way | None, choice: Choice) -> list[Instruction]:
    if way is None:
        raise ValueError("no way leads there")
    missed = choice.through - {instruction.address for instruction in way}
    if missed:
        raise ValueError(f"no way passes through the blocks at {', '.join(map(hex, sorted(missed)))}")
    return list(way)


def _way(graph: Mapping[int, Block], inner: Iterable[Loop], start: int, goal: int, choice: Choice) -> Way | None:
    """The best way from `start` to `goal`, through blocks of `graph`; None when there is none.

    The two may be the same: then the way is once around the loop that starts there.
    """
    edges = _edges(graph, inner, goal, choice)
    below = {node: {t for t, _ in ways if t in edges and t != start} for node, ways in edges.items()}
    best: dict[int, Way] = {_GOAL: ()}
    for node in TopologicalSorter(below).static_order():  # a block comes after those that it leads to
        ways = [steps + best[target] for target, steps in edges[node] if target in best]
        if ways:
            best[node] = max(ways, key=choice.rank)
    return best.get(start)


def _edges(
    graph: Mapping[int, Block], inner: Iterable[Loop], goal: int, choice: Choice
) -> dict[int, list[tuple[int, Way]]]:
    """For each block, and each inner loop as a whole: its successors, and the instructions executed until there."""
    hidden = {address for loop in inner for address in loop.blocks} | choice.around
    edges = {
        address: [(_GOAL if target == goal else target, block.instructions) for target in block.successors]
        for address, block in graph.items()
        if address not in hidden
    }
    for loop in inner:
        if loop.header in graph and loop.header not in (choice.around | {goal}):
            edges[loop.header] = [(_GOAL if target == goal else target, way) for target, way in _ways_out(loop, choice)]
    return edges


def _ways_out(loop: Loop, choice: Choice) -> Iterator[tuple[int, Way]]:
    """(block after an inner loop, instructions executed until there)."""
    trips = choice.trips.get(loop.header)
    if trips is None and loop.hmma:
        raise ValueError(f"how often does the inner loop at {loop.header:#x} run? It has HMMA instructions")
    body = _way(loop.blocks, loop.inner, loop.header, loop.header, choice)
    for target in _exits(loop):
        last = _way(loop.blocks, loop.inner, loop.header, target, choice)
        if body is not None and last is not None:
            yield target, body * ((trips or 1) - 1) + last


def _exits(loop: Loop) -> set[int]:
    return {s for block in loop.blocks.values() for s in block.successors if s not in loop.blocks}
