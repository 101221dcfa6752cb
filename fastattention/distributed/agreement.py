"""The agreement of the ranks of a group before the first sum of a call: that it is one call, and its strategy.

Collectives match by the order in which they are issued. Other blocks on one rank would give a wrong sum, or a hang. A
call that is new to a group is therefore compared over all ranks, and its strategies are tried by all of them together.
Agreements are kept: later calls with the same key look them up, and communicate only their sums. Since every rank makes
the same calls in the same order, a key is new to all of them or to none.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Hashable
from dataclasses import asdict, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from fastattention.attention.backend import ATTENTION_BACKENDS
from fastattention.attention.problem import Inputs, Layout, Problem
from fastattention.distributed import transports
from fastattention.distributed.autotune import Trial
from fastattention.distributed.object_collectives import check_serves, from_rank_0, gather
from fastattention.distributed.row_blocks import Attend, AttentionOutProj, Strategy, may_cut_sequences
from fastattention.distributed.row_partitions import Partition, partitions, worth_dividing
from fastattention.distributed.transports import Transfer, Transport
from fastattention.engine.signature import CallSignature
from fastattention.errors import ArgumentError, UnsupportedError

MOST_KEPT = 4096  # agreements of a group


class Key(NamedTuple):
    """Everything that a strategy depends on, and that must be the same on all ranks."""

    problem: Problem
    hidden: int
    has_bias: bool
    backend: str
    transport: str  # "auto" or a name
    rows: tuple[int, ...] | None  # rows of each block; None for "auto"


Place = tuple[str, int]  # identifies a strategy: its transport, and the index of a recipe; -1: all rows in one block
WHOLE = -1


class Agreed(NamedTuple):
    """The strategies of a call: eagerly, and in a captured CUDA graph, whose launches cost nothing."""

    eager: Strategy
    graph: Strategy

    def now(self, device: torch.device) -> Strategy:
        """The strategy for a call now."""
        return self.eager if self.eager is self.graph or not _is_capturing(device) else self.graph


class CachedCall(NamedTuple):
    """What is known of the calls of a signature."""

    key: Key
    attend: Attend
    agreed: Agreed
    cuda_index: int | None  # index of the GPU; None on other devices


class Agreement:
    """Everything that one group has agreed on. It keeps no reference to the group."""

    def __init__(self, group_size: int) -> None:
        self.group_size = group_size
        self.transports: dict[tuple[str, torch.device], Transport] = {}
        self.agreed: dict[Key, Agreed] = {}
        # Holds only keys in `agreed`, which either all ranks have or none.
        self.calls: dict[CallSignature | None, CachedCall] = {}
        # Winners, eagerly and in a graph, by the kind of calls and the transports that were tried.
        self._winners: dict[tuple[Hashable, tuple[str, ...]], tuple[Place, Place]] = {}

    def of(self, key: Key, call: AttentionOutProj, group: ProcessGroup) -> Strategy:
        """The strategy of a call. Collective the first time, one look-up from then on.

        Raises ArgumentError where the group has no backend for the device, and on all ranks where their calls differ;
        UnsupportedError where no transport can serve it.
        """
        device = key.problem.device
        known = self.agreed.get(key)
        if known is None:
            check_serves(group, device)
            if _is_capturing(device):
                raise ArgumentError(
                    "a call of a new shape cannot be captured in a CUDA graph: its ranks have to agree on a "
                    "transport and a partition first. Make the same call once before the capture"
                )
            _check_same(key, group)
            num_trials = len(self._winners)
            known = self._agree(key, call, group)
            if len(self.agreed) == MOST_KEPT:
                del self.agreed[next(iter(self.agreed))]  # the oldest, which is the same on every rank
                self.calls.clear()
            self.agreed[key] = known
            if len(self._winners) != num_trials:
                self._release_unused()
            known.graph.transport.reserve(key.problem.total_q * key.hidden * key.problem.dtype.itemsize)
        return known.now(device)

    def remember(self, signature: CallSignature, key: Key, inputs: Inputs) -> None:
        """Caches the key of calls of this signature, with tensors like these, if the group has agreed on it."""
        agreed = self.agreed.get(key)
        if agreed is not None:
            if len(self.calls) >= MOST_KEPT and signature not in self.calls:
                self.calls.clear()
            device = key.problem.device
            attend = ATTENTION_BACKENDS.select(key.problem, key.backend).make_call(key.problem, inputs)
            self.calls[signature] = CachedCall(key, attend, agreed, device.index if device.type == "cuda" else None)

    def _release_unused(self) -> None:
        """Releases the memory of transports that have been tried, and serve no call."""
        used = {id(each.transport) for known in self.agreed.values() for each in known}
        for transport in self.transports.values():
            if id(transport) not in used:
                transport.release()

    def _agree(self, key: Key, call: AttentionOutProj, group: ProcessGroup) -> Agreed:
        """The fastest strategies. One call of each kind is tried; the others of the kind use its strategies."""
        problem, rows = key.problem, key.rows or (key.problem.total_q,)
        transfer = Transfer(problem.total_q, key.hidden, problem.dtype, problem.device, len(rows))
        able = self._able(key.transport, transfer, group)
        places = {(each.name, WHOLE): Strategy(each, Partition(rows, each.attention_rows(rows))) for each in able}
        kind: Hashable = (transfer.dtype, transfer.hidden, _magnitude(transfer.rows))
        if key.rows is not None:
            kind = key
        elif worth_dividing(transfer.rows, transfer.nbytes):
            kind = from_rank_0(lambda: _kind_of(call), group)  # rank 0's lengths decide
            for each in able:
                whole = not may_cut_sequences(problem)
                for place, one in partitions(each.recipes, problem.batch_size, problem.seqlen_q, whole_sequences=whole):
                    places[each.name, place] = Strategy(each, one)
        if len(places) == 1:
            return Agreed(*2 * tuple(places.values()))
        tried = (kind, tuple(each.name for each in able))
        if tried not in self._winners:
            eager, graph = Trial(list(places.values()), call, transfer, group).winners()
            self._winners[tried] = list(places)[eager], list(places)[graph]
        # A call of the same kind may be too small for the blocks of the one that was tried.
        return Agreed(*(places.get(won, places[won[0], WHOLE]) for won in self._winners[tried]))

    def _able(self, asked: str, transfer: Transfer, group: ProcessGroup) -> list[Transport]:
        """The transports that can serve `transfer`; they are made if need be."""
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


_agreements: weakref.WeakKeyDictionary[ProcessGroup, Agreement] = weakref.WeakKeyDictionary()


def named_group(group: object) -> ProcessGroup:
    """The group that `group` names, None being the default one. Raises ArgumentError unless this process is in it."""
    if group is None:
        default = dist.group.WORLD
        if default is None:
            raise ArgumentError("group=None: torch.distributed is not initialized; call init_process_group first")
        return default
    if not isinstance(group, ProcessGroup):
        raise ArgumentError(
            f"group must be a torch.distributed.ProcessGroup that this rank is in, or None, got {type(group).__name__}"
        )
    try:
        dist.get_process_group_ranks(group)
    except KeyError as error:
        raise ArgumentError(
            "group has been destroyed; give one of the groups there are, or None after init_process_group"
        ) from error
    return group


def agreement_of(group: ProcessGroup) -> Agreement:
    """The agreement of a group, whose transports are closed when the group is gone."""
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


def _kind_of(call: AttentionOutProj) -> Hashable:
    """The kind of a call: calls alike to a factor of two in each length. Reads the lengths of a cache."""
    problem, lengths = call.problem, call.inputs.cache_seqlens
    seqlen_k = problem.seqlen_k
    if problem.layout is Layout.KVCACHE and lengths is not None:
        seqlen_k = round(lengths.float().mean().item())
    like = replace(
        problem,
        batch_size=_magnitude(problem.batch_size),
        seqlen_q=_magnitude(problem.seqlen_q),
        seqlen_k=_magnitude(seqlen_k),
        total_q=0,
    )
    return like, call.weight.shape[1], call.backend


def _magnitude(length: int) -> int:
    """The nearest power of two, so that lengths on either side of one are alike."""
    return round(math.log2(max(length, 1)))


def _check_same(key: Key, group: ProcessGroup) -> None:
    """Raises ArgumentError on all ranks unless all have this key, each on its own device."""
    problem = replace(key.problem, device=torch.device(key.problem.device.type))
    keys = gather(key._replace(problem=problem), group)
    for rank, other in enumerate(keys):
        if other != keys[0]:
            raise ArgumentError(
                f"the ranks of a group must make the same call: rank {rank} has {_differences(other, keys[0])}, "
                f"rank 0 has {_differences(keys[0], other)}"
            )


def _differences(key: Key, other: Key) -> str:
    """The values of `key` that differ from those of `other`, by name."""
    mine, others = ({**asdict(each.problem), **each._asdict(), "problem": None} for each in (key, other))
    return ", ".join(f"{name}={value}" for name, value in mine.items() if value != others[name])
