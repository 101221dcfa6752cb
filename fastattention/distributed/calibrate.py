"""What plans are made from, measured where the calls run: all-reduces of a group, and the compute of a call.

The times of all-reduces are kept on disk, one file for each kind of group: its hosts and devices, backend, versions and
settings.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import socket
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fastattention import config, files
from fastattention.distributed.blocks import AttentionLinear, Piece, may_cut_sequences
from fastattention.distributed.costs import ComputeCost, Table, TransportCost, Workload
from fastattention.distributed.divisions import even
from fastattention.distributed.exchange import from_rank_0, gather, largest
from fastattention.distributed.timing import ROUNDS, Laps, module_of, queued_seconds
from fastattention.distributed.transports import BlockTransport, Transfer
from fastattention.problem import Layout, Problem

SMALLEST_BYTES = 64 << 10
LARGEST_BYTES = 256 << 20
LARGEST_BYTES_ON_CPU = 16 << 20
GROWTH = 4  # from one size to the next
SHORT_BYTES = 1 << 20  # up to which ranks that are late to one all-reduce would be most of its time
CALLS_IN_A_ROW = 8  # of those
TABLE_SECONDS = 1.0  # a table ends before the size that would take it beyond
HIDDEN = 1024  # columns of what is summed
LONGEST_SLOWDOWN_SECONDS = 0.02  # an all-reduce about this long is long enough to see what it does to compute
LEAST_PROGRESS = 0.01  # of all-reduces beside compute, of what they do alone
SIDE = 4096  # of the matrices whose product is compute
SIDE_ON_CPU = 256
COMPUTE_SECONDS = 0.3  # no further round of a call's parts once it has taken so long
BLOCKS = 4  # into which a call is divided to see what that costs


def transport_costs(
    transports: Sequence[BlockTransport], transfer: Transfer, group: ProcessGroup
) -> tuple[TransportCost, ...]:
    """What each transport takes in this group, for rows like those of `transfer`. Collective; the same on all ranks."""
    identity = _identity(transports, transfer, group)
    path = _path(identity)
    known = from_rank_0(lambda: _read(path, identity), group)
    if known is not None:
        return known
    costs = tuple(_Measurement(transport, transfer, group).cost() for transport in transports)
    from_rank_0(lambda: _write(path, identity, costs), group)
    return costs


def _identity(transports: Sequence[BlockTransport], transfer: Transfer, group: ProcessGroup) -> dict[str, Any]:
    """All that the times of all-reduces depend on."""
    device = transfer.device
    return {
        "transports": [transport.name for transport in transports],
        "dtype": str(transfer.dtype),
        "ranks": gather([socket.gethostname(), _device_name(device)], group),
        "backend": group._get_backend(device).name(),
        "torch": torch.__version__,
        "nccl": list(torch.cuda.nccl.version()) if device.type == "cuda" else [],  # type: ignore[no-untyped-call]
        "settings": config.collective_settings(),
    }


def _device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs"
    return str(module_of(device).get_device_name(device))


def _path(identity: dict[str, Any]) -> Path:
    name = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:24]
    return config.kernel_cache() / "allreduce" / f"{name}.json"


def _read(path: Path, identity: dict[str, Any]) -> tuple[TransportCost, ...] | None:
    """The costs in a file; None where there is none, or none of ours."""
    try:
        content = json.loads(path.read_bytes())
        if content["group"] != identity:
            return None
        return tuple(
            TransportCost(
                cost["name"],
                _table(cost["table"]),
                cost["slowdown"],
                _table(cost["serial_table"]),
                cost["own_slowdown"],
            )
            for cost in content["transports"]
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _table(pairs: Sequence[Sequence[Any]]) -> Table:
    return tuple((size, seconds) for size, seconds in pairs)


def _write(path: Path, identity: dict[str, Any], costs: Sequence[TransportCost]) -> None:
    content = json.dumps({"group": identity, "transports": [asdict(cost) for cost in costs]}, indent=1)
    try:
        files.write_atomically(path, content.encode())
    except OSError as error:
        warnings.warn(
            f"the times of all-reduces cannot be kept in {path.parent}: {error.strerror or error}; the next process "
            "measures them again. Set FASTATTENTION_CACHE to a folder that can be written",
            RuntimeWarning,
            stacklevel=2,
        )


def ascending(table: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """The same with no size slower than a larger one: that was something else that kept the machine busy."""
    quickest = list(accumulate((seconds for _, seconds in reversed(table)), min))
    return tuple((size, seconds) for (size, _), seconds in zip(table, reversed(quickest), strict=True))


class Slowdowns(NamedTuple):
    """While compute and all-reduces run, either takes 1 + so many times as long."""

    compute: float
    own: float  # of the all-reduces


def slowdowns_of(alone: float, under: float, summed_alone: float, summed: float) -> Slowdowns:
    """From seconds of compute alone and beside all-reduces, and of these alone and beside it, until all is done."""
    done = summed_alone - (summed - under)  # of the all-reduces while compute ran, in seconds that it takes alone
    return Slowdowns(max(under / alone - 1.0, 0.0), max(under / max(done, LEAST_PROGRESS * under) - 1.0, 0.0))


class _Measurement:
    """One transport in one group. All ranks take the same steps: what these depend on is agreed first."""

    def __init__(self, transport: BlockTransport, transfer: Transfer, group: ProcessGroup) -> None:
        self._transport = transport
        self._device, self._dtype = transfer.device, transfer.dtype
        self._group = group

    def cost(self) -> TransportCost:
        """Its tables, and what it does to compute."""
        table, serial_table = [], []
        spent, limit, size = 0.0, self._largest_bytes(), SMALLEST_BYTES
        while True:
            seconds, serial_seconds = (self._all_reduce_seconds(size, serial) for serial in (False, True))
            table.append((size, seconds))
            serial_table.append((size, serial_seconds))
            spent += (ROUNDS + 1) * (seconds + serial_seconds)
            size *= GROWTH
            if size > limit or spent + GROWTH * (ROUNDS + 1) * (seconds + serial_seconds) > TABLE_SECONDS:
                break
        short = [size for size, seconds in table if seconds <= LONGEST_SLOWDOWN_SECONDS]
        slowdown, own_slowdown = self._slowdowns(max(short, default=SMALLEST_BYTES))
        return TransportCost(self._transport.name, ascending(table), slowdown, ascending(serial_table), own_slowdown)

    def _largest_bytes(self) -> float:
        if self._device.type == "cpu":
            return LARGEST_BYTES_ON_CPU
        free, _ = module_of(self._device).mem_get_info(self._device)
        return min(LARGEST_BYTES, -self._agreed(-free) // 4)

    def _agreed(self, value: float) -> float:
        return largest([value], self._device, self._group)[0]

    def _rows(self, nbytes: int) -> Tensor:
        return torch.zeros(nbytes // (HIDDEN * self._dtype.itemsize), HIDDEN, dtype=self._dtype, device=self._device)

    def _all_reduce_seconds(self, nbytes: int, serial: bool = False) -> float:
        out = self._rows(nbytes)

        in_a_row = CALLS_IN_A_ROW if nbytes <= SHORT_BYTES else 1

        def all_reduce() -> None:
            for _ in range(in_a_row):
                partials = self._transport.begin(out, [out.shape[0]])
                if serial:
                    self._transport.all_reduce_now(partials, out)
                else:
                    self._transport.all_reduce(partials, out).wait()

        return self._agreed(queued_seconds(all_reduce, self._device) / in_a_row)

    def _slowdowns(self, nbytes: int) -> Slowdowns:
        """Of matrix products beside two all-reduces, alone each as long as all of the products."""
        out = self._rows(2 * nbytes)
        count, multiply = 1, self._product()

        def compute() -> None:
            for _ in range(count):
                multiply()

        once = queued_seconds(compute, self._device)
        count = max(round(self._all_reduce_seconds(nbytes) / once), 1)
        alone = queued_seconds(compute, self._device)
        summed_alone = median(self._beside(lambda: None, out)[1] for _ in range(ROUNDS))
        found = []
        for _ in range(ROUNDS):
            under, summed = self._beside(compute, out)
            found.append(slowdowns_of(alone, under, summed_alone, summed))
        return Slowdowns(*(self._agreed(median(kind)) for kind in zip(*found, strict=True)))

    def _beside(self, compute: Callable[[], object], out: Tensor) -> tuple[float, float]:
        """Seconds of `compute` beside two all-reduces, and from where these begin until all is done."""
        halves = out.chunk(2)
        self._agreed(0.0)  # ranks begin together
        laps = Laps(self._device)
        partials = self._transport.begin(out, [len(half) for half in halves]).chunk(2)
        pending = [self._transport.all_reduce(*half) for half in zip(partials, halves, strict=True)]
        laps.mark()
        compute()
        laps.mark()
        for each in pending:
            each.wait()
        laps.mark()
        begun, under, rest = laps.seconds()
        return under, begun + under + rest

    def _product(self) -> Callable[[], object]:
        side = SIDE_ON_CPU if self._device.type == "cpu" else SIDE
        left, right = (torch.randn(side, side, dtype=self._dtype, device=self._device) for _ in range(2))
        return lambda: torch.mm(left, right)


def workload_of(call: AttentionLinear, group_size: int) -> Workload:
    """The work of a call on one rank. Reads the lengths of a cache, hence waits for its device."""
    problem = call.problem
    seqlen_k = problem.seqlen_k
    if problem.layout is Layout.KVCACHE and call.inputs.cache_seqlens is not None:
        seqlen_k = max(round(call.inputs.cache_seqlens.float().mean().item()), 0)
    return Workload(
        batch_size=problem.batch_size,
        seqlen_q=problem.seqlen_q,
        seqlen_k=seqlen_k,
        nheads=problem.nheads,
        nheads_k=problem.nheads_k,
        headdim=problem.headdim,
        headdim_v=problem.headdim_v,
        hidden=call.weight.shape[1],
        itemsize=problem.dtype.itemsize,
        tp=group_size,
        causal=problem.window_right == 0,
        window_size=(problem.window_left, problem.window_right),
        whole_sequences=not may_cut_sequences(problem),
    )


Kind = tuple[Problem, int, str]


def kind_of(call: AttentionLinear, workload: Workload) -> Kind:
    """What calls have in common that are alike, to a factor of two in each length."""
    like = replace(
        call.problem,
        batch_size=magnitude(workload.batch_size),
        seqlen_q=magnitude(workload.seqlen_q),
        seqlen_k=magnitude(workload.seqlen_k),
        total_q=0,
    )
    return like, workload.hidden, call.backend


class ComputeCosts:
    """What calls take on this rank. Calls that are alike are measured once."""

    def __init__(self) -> None:
        self._known: dict[Kind, tuple[Workload, ComputeCost]] = {}

    def of(self, call: AttentionLinear, workload: Workload) -> ComputeCost:
        """The cost of a call: measured, or that of a call like it in proportion to the work."""
        key = kind_of(call, workload)
        if key not in self._known:
            self._known[key] = (workload, measure_compute(call, workload))
        measured, cost = self._known[key]
        rows = workload.rows / measured.rows
        pairs = workload.attention_flop() / max(measured.attention_flop(), 1)
        return replace(
            cost, attention_seconds=cost.attention_seconds * pairs, linear_seconds=cost.linear_seconds * rows
        )


def magnitude(length: int) -> int:
    """The nearest power of two, so that lengths on either side of one are alike."""
    return round(math.log2(max(length, 1)))


def measure_compute(call: AttentionLinear, workload: Workload) -> ComputeCost:
    """Runs a call, whole and in blocks, without its sums. Takes the memory of its results."""
    device = call.problem.device
    whole = Piece(0, workload.batch_size, 0, workload.seqlen_q)
    attended = call.attend(whole)
    partial = attended.new_empty(workload.rows, workload.hidden)
    attention = _compute_seconds(lambda: call.attend(whole), device)
    linear = _compute_seconds(lambda: torch.mm(attended, call.weight, out=partial), device)
    ends = [0, *accumulate(even(workload, BLOCKS))]
    cuts = sum(1 + (workload.causal and end % workload.seqlen_q != 0) for end in ends[1:-1])
    if not cuts:
        return ComputeCost(attention, linear, 0.0)

    def in_blocks() -> None:
        for start, stop in pairwise(ends):
            call.compute(start, stop, partial[start:stop])

    return ComputeCost(attention, linear, max(_compute_seconds(in_blocks, device) - attention - linear, 0.0) / cuts)


def _compute_seconds(work: Callable[[], object], device: torch.device) -> float:
    return queued_seconds(work, device, at_most=COMPUTE_SECONDS)
