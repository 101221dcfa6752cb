"""What the ranks of a group agree on before the first sum of a call: that it is one call, its blocks, its transport.

Collectives match by the order in which they are issued: another plan on one rank would be a wrong sum, or one that
never comes. A call that is new to a group is therefore compared over all ranks, and its plan made by rank 0 alone.
What is agreed is kept: later calls with the same key look it up, and communicate nothing but their sums. Since every
rank makes the same calls in the same order, a key is new to all of them or to none.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from fastattention.distributed import calibrate, transports
from fastattention.distributed.blocks import AttentionLinear
from fastattention.distributed.costs import TransportCost
from fastattention.distributed.divisions import Blocks, even, fine, in_a_ring, worth_dividing
from fastattention.distributed.exchange import check_serves, from_rank_0, gather
from fastattention.distributed.plan import choose
from fastattention.distributed.transports import BlockTransport, Transfer, Transport
from fastattention.distributed.trials import Candidate, Trial
from fastattention.errors import ArgumentError, UnsupportedError
from fastattention.problem import Problem

MOST_KEPT = 4096  # agreements of a group; as many as validated problems


class Key(NamedTuple):
    """Everything that a plan depends on, and all in which the ranks must not differ."""

    problem: Problem
    hidden: int
    has_bias: bool
    backend: str
    transport: str  # "auto" or a name
    rows: tuple[int, ...] | None  # of each block; None for "auto"


Looks = tuple[Hashable, ...]  # all that the checks of a call read of its arguments


class Agreed(NamedTuple):
    """How a call is made: as it is called, and where a CUDA graph is captured, whose launches cost nothing."""

    called: Candidate
    captured: Candidate

    @classmethod
    def always(cls, candidate: Candidate) -> Agreed:
        """One way for both."""
        return cls(candidate, candidate)

    def now(self, device: torch.device) -> Candidate:
        """The way that is due."""
        return self.called if self.called is self.captured or not _is_capturing(device) else self.captured


class Repeat(NamedTuple):
    """What calls come to whose arguments look the same."""

    key: Key
    agreed: Agreed
    cuda_index: int | None  # of the device; None where that is no GPU


class Division(enum.Enum):
    """Into which blocks a call is divided, whatever its lengths."""

    WHOLE = enum.auto()
    PLANNED = enum.auto()  # as the model chooses
    EVEN = enum.auto()  # which often does better than the model knows
    FINE = enum.auto()  # into more blocks, with attention of each or of several at once
    RING = enum.auto()  # for running sums, to which products add


EVEN_BLOCKS = 4


class Way(NamedTuple):
    """How a call can be made."""

    transport: str
    division: Division
    room: int = 0  # of the transport's
    which: int = 0  # of several such divisions


class Verdict(NamedTuple):
    """The ways that have won for calls that are alike."""

    called: Way
    captured: Way


class Agreement:
    """All that one group has agreed on. It keeps no reference to the group."""

    def __init__(self, group_size: int) -> None:
        self.group_size = group_size
        self.transports: dict[tuple[str, torch.device], Transport] = {}
        self.agreed: dict[Key, Agreed] = {}
        self.repeats: dict[Looks, Repeat] = {}  # only of keys in `agreed`, which are new to all ranks or to none
        self._costs: dict[tuple[torch.dtype, tuple[str, ...]], tuple[TransportCost, ...]] = {}
        self._compute_costs = calibrate.ComputeCosts()
        # By what calls have in common, and the transports that were tried.
        self._verdicts: dict[tuple[Hashable, tuple[str, ...]], Verdict] = {}

    def of(self, key: Key, call: AttentionLinear, group: ProcessGroup) -> Candidate:
        """The blocks of a call and their transport. Collective the first time, one look-up from then on.

        Raises ArgumentError where the group has no backend for the device, and on all ranks where their calls differ;
        UnsupportedError where no transport can serve it.
        """
        known = self.agreed.get(key)
        if known is None:
            check_serves(group, key.problem.device)
            _check_not_capturing(key.problem.device)
            _check_same(key, group)
            measured = len(self._costs), len(self._verdicts)
            known = self._agree(key, call, group)
            if len(self.agreed) == MOST_KEPT:
                del self.agreed[next(iter(self.agreed))]  # the oldest: on every rank the same
                self.repeats.clear()
            self.agreed[key] = known
            if (len(self._costs), len(self._verdicts)) != measured:  # which takes memory of all transports
                self._release_unused()
            self._reserve(key, known.captured)
        return known.now(key.problem.device)

    def remember(self, looks: Looks, key: Key) -> None:
        """Calls of these looks have this key. Nothing is kept where nothing has been agreed on for it."""
        agreed = self.agreed.get(key)
        if agreed is not None:
            if len(self.repeats) >= MOST_KEPT and looks not in self.repeats:
                self.repeats.clear()
            device = key.problem.device
            self.repeats[looks] = Repeat(key, agreed, device.index if device.type == "cuda" else None)

    def _release_unused(self) -> None:
        """The memory of transports that have been measured and tried, and serve no call."""
        used = {id(each.transport) for known in self.agreed.values() for each in known}
        for transport in self.transports.values():
            if id(transport) not in used:
                transport.release()

    def _reserve(self, key: Key, captured: Candidate) -> None:
        row = key.hidden * key.problem.dtype.itemsize
        captured.transport.reserve(sum(captured.rows) * row, max(captured.rows) * row)

    def _agree(self, key: Key, call: AttentionLinear, group: ProcessGroup) -> Agreed:
        problem = key.problem
        transfer = Transfer(problem.total_q, key.hidden, problem.dtype, problem.device, self.group_size)
        able = self._able(key.transport, transfer, group)
        if key.rows is not None:
            return Agreed.always(Candidate(key.rows, self._quickest(able, transfer, key.rows, group)))
        kind: Hashable = (transfer.dtype, transfer.hidden, calibrate.magnitude(transfer.rows))
        ways = {Way(each.name, Division.WHOLE): Blocks((transfer.rows,)) for each in able}
        if worth_dividing(transfer.rows, transfer.nbytes):
            costs = self._costs_of(able, transfer, group)
            kind, divided = from_rank_0(lambda: self._divided(call, transfer, able, costs), group)
            ways |= divided
        return self._try(kind, ways, call, transfer, group)

    def _quickest(
        self, able: Sequence[Transport], transfer: Transfer, rows: Sequence[int], group: ProcessGroup
    ) -> Transport:
        """The transport that sums blocks of these rows soonest, of those whose sums have a time of their own.

        Costs are the same on all ranks, so this is too.
        """
        if len(able) == 1:
            return able[0]
        sizes = [count * transfer.nbytes // transfer.rows for count in rows]

        def seconds(cost: TransportCost) -> float:
            return sum(map(cost.seconds, sizes)) if len(sizes) > 1 else cost.serial_seconds(sizes[0])

        costs = self._costs_of(able, transfer, group)
        return self.transports[min(costs, key=seconds).name, transfer.device]

    def _try(
        self,
        kind: Hashable,
        ways: Mapping[Way, Blocks],
        call: AttentionLinear,
        transfer: Transfer,
        group: ProcessGroup,
    ) -> Agreed:
        """The ways that win in a trial. Of calls of a kind one is tried: the others are made in the same ways."""
        candidates = {
            way: Candidate(blocks.rows, self.transports[way.transport, transfer.device], way.room, blocks.attended)
            for way, blocks in ways.items()
        }
        if len(candidates) == 1:
            return Agreed.always(*candidates.values())
        tried = (kind, tuple(way.transport for way in ways if way.division is Division.WHOLE))
        if tried not in self._verdicts:
            winners = Trial(list(candidates.values()), call, transfer, group).winners()
            self._verdicts[tried] = Verdict(*(list(candidates)[place] for place in winners))
        return Agreed(
            *(
                candidates.get(way, candidates[Way(way.transport, Division.WHOLE)])  # too little of it to divide
                for way in self._verdicts[tried]
            )
        )

    def _divided(
        self, call: AttentionLinear, transfer: Transfer, able: Sequence[Transport], costs: Sequence[TransportCost]
    ) -> tuple[calibrate.Kind, dict[Way, Blocks]]:
        """What the call is like, and ways to make it in blocks: by the lengths and clocks of one rank."""
        workload = calibrate.workload_of(call, transfer.group_size)
        compute = self._compute_costs.of(call, workload)
        ways: dict[Way, Blocks] = {}
        for cost in costs:
            planned = choose(workload, compute, [cost]).rows
            for room in range(len(self.transports[cost.name, transfer.device].rooms) if len(planned) > 1 else 0):
                ways[Way(cost.name, Division.PLANNED, room)] = Blocks(planned)
                ways[Way(cost.name, Division.EVEN, room)] = Blocks(even(workload, EVEN_BLOCKS))
                for which, blocks in enumerate(fine(workload)):
                    ways[Way(cost.name, Division.FINE, room, which)] = blocks
        for transport in able:
            if transport.asks_for_shares:
                for which, blocks in in_a_ring(workload).items():
                    ways[Way(transport.name, Division.RING, which=which)] = blocks
        return calibrate.kind_of(call, workload), ways

    def _able(self, asked: str, transfer: Transfer, group: ProcessGroup) -> list[Transport]:
        """The transports that can serve `transfer`, made if need be."""
        able, reasons = [], []
        for name in transports.TRANSPORTS if asked == "auto" else [asked]:
            place = (name, transfer.device)
            if place not in self.transports:
                self.transports[place] = transports.make(name, group, transfer.device)
            reason = self.transports[place].why_not(transfer)
            if reason is None:
                able.append(self.transports[place])
            reasons.append(f"  {name}: {reason}")
        if not able:
            raise UnsupportedError("no transport can sum the rows of this call:\n" + "\n".join(reasons))
        return able

    def _costs_of(
        self, able: Sequence[Transport], transfer: Transfer, group: ProcessGroup
    ) -> tuple[TransportCost, ...]:
        measured = [transport for transport in able if isinstance(transport, BlockTransport)]
        place = (transfer.dtype, tuple(transport.name for transport in measured))
        if place not in self._costs:
            self._costs[place] = calibrate.transport_costs(measured, transfer, group)
        return self._costs[place]


_agreements: weakref.WeakKeyDictionary[ProcessGroup, Agreement] = weakref.WeakKeyDictionary()


def agreement_of(group: ProcessGroup) -> Agreement:
    """The one of a group, whose transports are closed when the group is gone."""
    known = _agreements.get(group)
    if known is None:
        known = _agreements[group] = Agreement(dist.get_world_size(group))
        weakref.finalize(group, _close, known.transports).atexit = False
    return known


def _close(made: dict[tuple[str, torch.device], Transport]) -> None:
    for transport in made.values():
        transport.close()


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _check_not_capturing(device: torch.device) -> None:
    if _is_capturing(device):
        raise ArgumentError(
            "a call of a new shape cannot be captured in a CUDA graph: its ranks have to agree on a plan first. Make "
            "the same call once before the capture"
        )


def _check_same(key: Key, group: ProcessGroup) -> None:
    """Raises ArgumentError on all ranks unless all have this key, on whichever device of their own."""
    problem = replace(key.problem, device=torch.device(key.problem.device.type))
    keys = gather(key._replace(problem=problem), group)
    for rank, other in enumerate(keys):
        if other != keys[0]:
            raise ArgumentError(
                f"the ranks of a group must make the same call: rank {rank} has {_differences(other, keys[0])}, "
                f"rank 0 has {_differences(keys[0], other)}"
            )


def _differences(key: Key, other: Key) -> str:
    """The values of `key` that are not those of `other`, by name."""
    mine, others = ({**asdict(each.problem), **each._asdict(), "problem": None} for each in (key, other))
    return ", ".join(f"{name}={value}" for name, value in mine.items() if value != others[name])
