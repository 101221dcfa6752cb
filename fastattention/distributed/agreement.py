"""What the ranks of a group agree on before the first sum of a call: that it is one call, its blocks, its transport.

Collectives match by the order in which they are issued: another plan on one rank would be a wrong sum, or one that
never comes. A call that is new to a group is therefore compared over all ranks, and its plan made by rank 0 alone.
What is agreed is kept: later calls with the same key look it up, and communicate nothing but their sums. Since every
rank makes the same calls in the same order, a key is new to all of them or to none.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from fastattention.distributed import calibrate, transports
from fastattention.distributed.blocks import AttentionLinear
from fastattention.distributed.costs import TransportCost
from fastattention.distributed.exchange import from_rank_0, gather
from fastattention.distributed.plan import choose
from fastattention.distributed.transports import Transfer, Transport
from fastattention.distributed.trials import Candidate, run_trials
from fastattention.errors import ArgumentError, UnsupportedError
from fastattention.problem import Problem

# Calls that are alike, and the transports that were tried.
Verdict = tuple[calibrate.Kind, tuple[str, ...]]

MOST_KEPT = 4096  # agreements of a group; as many as validated problems


class Key(NamedTuple):
    """Everything that a plan depends on, and all in which the ranks must not differ."""

    problem: Problem
    hidden: int
    has_bias: bool
    backend: str
    transport: str  # "auto" or a name
    rows: tuple[int, ...] | None  # of each block; None for "auto"


class Agreed(NamedTuple):
    """How a call is made: as it is called, and where a CUDA graph is captured, whose launches cost nothing."""

    called: Candidate
    captured: Candidate

    @classmethod
    def always(cls, candidate: Candidate) -> Agreed:
        """One way for both."""
        return cls(candidate, candidate)


class Agreement:
    """All that one group has agreed on. It keeps no reference to the group."""

    def __init__(self) -> None:
        self.transports: dict[tuple[str, torch.device], Transport] = {}
        self.agreed: dict[Key, Agreed] = {}
        self._costs: dict[tuple[torch.dtype, tuple[str, ...]], tuple[TransportCost, ...]] = {}
        self._compute_costs = calibrate.ComputeCosts()
        self._verdicts: dict[Verdict, tuple[str | None, str | None]] = {}

    def of(self, key: Key, call: AttentionLinear, group: ProcessGroup) -> Candidate:
        """The blocks of a call and their transport. Collective the first time, one look-up from then on.

        Raises ArgumentError on all ranks where their calls differ, UnsupportedError where no transport can serve it.
        """
        known = self.agreed.get(key)
        if known is None:
            _check_not_capturing(key.problem.device)
            _check_same(key, group)
            known = self._agree(key, call, group)
            if len(self.agreed) == MOST_KEPT:
                del self.agreed[next(iter(self.agreed))]  # the oldest: on every rank the same
            self.agreed[key] = known
        return known.captured if _is_capturing(key.problem.device) else known.called

    def _agree(self, key: Key, call: AttentionLinear, group: ProcessGroup) -> Agreed:
        problem = key.problem
        transfer = Transfer(problem.total_q, key.hidden, problem.dtype, problem.device, dist.get_world_size(group))
        able = self._able(key.transport, transfer, group)
        rows = key.rows or (problem.total_q,)
        decided = key.rows is not None or not calibrate.worth_dividing(transfer)
        if len(able) == 1 and decided:
            return Agreed.always(Candidate(rows, able[0]))
        costs = self._costs_of(able, transfer, group)
        quickest = _quickest(costs, [count * transfer.nbytes // transfer.rows for count in rows])
        candidate = Candidate(rows, self.transports[quickest, problem.device])
        return Agreed.always(candidate) if decided else self._divide(call, transfer, costs, candidate, group)

    def _divide(
        self,
        call: AttentionLinear,
        transfer: Transfer,
        costs: Sequence[TransportCost],
        undivided: Candidate,
        group: ProcessGroup,
    ) -> Agreed:
        """In the blocks that rank 0 chooses for each transport, if a trial shows that it pays, or undivided.

        Of calls that are alike one is tried: the others take the transport that has won.
        """
        kind, plans = from_rank_0(lambda: self._choose(call, transfer, costs), group)
        divided = {
            name: Candidate(rows, self.transports[name, transfer.device]) for name, rows in plans if len(rows) > 1
        }
        verdict = (kind, tuple(cost.name for cost in costs))
        if verdict not in self._verdicts:
            if not divided:
                return Agreed.always(undivided)
            winners = run_trials([undivided, *divided.values()], call, transfer, group)
            called, captured = ([None, *divided][place] for place in winners)
            self._verdicts[verdict] = called, captured
        return Agreed(
            *(undivided if name is None else divided.get(name, undivided) for name in self._verdicts[verdict])
        )

    def _choose(
        self, call: AttentionLinear, transfer: Transfer, costs: Sequence[TransportCost]
    ) -> tuple[calibrate.Kind, list[tuple[str, tuple[int, ...]]]]:
        """What the call is like, and the blocks for each transport: by the lengths and clocks of one rank."""
        workload = calibrate.workload_of(call, transfer.group_size)
        compute = self._compute_costs.of(call, workload)
        return calibrate.kind_of(call, workload), [
            (cost.name, choose(workload, compute, [cost]).rows) for cost in costs
        ]

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
        place = (transfer.dtype, tuple(transport.name for transport in able))
        if place not in self._costs:
            self._costs[place] = calibrate.transport_costs(able, transfer, group)
        return self._costs[place]


_agreements: weakref.WeakKeyDictionary[ProcessGroup, Agreement] = weakref.WeakKeyDictionary()


def agreement_of(group: ProcessGroup) -> Agreement:
    """The one of a group, whose transports are closed when the group is gone."""
    known = _agreements.get(group)
    if known is None:
        known = _agreements[group] = Agreement()
        weakref.finalize(group, _close, known.transports).atexit = False
    return known


def _close(made: dict[tuple[str, torch.device], Transport]) -> None:
    for transport in made.values():
        transport.close()


def _quickest(costs: Sequence[TransportCost], sizes: Sequence[int]) -> str:
    """The transport that sums blocks of these bytes soonest. Costs are the same on all ranks, so this is too."""
    return min(costs, key=lambda cost: sum(map(cost.seconds, sizes))).name


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
