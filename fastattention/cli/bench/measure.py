"""Measures one workload on all its peers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from fastattention.cli.bench.accuracy import max_error
from fastattention.cli.bench.peaks import limit_loop
from fastattention.cli.bench.peers import Peer, PreparedPeer
from fastattention.cli.bench.timing import Timing, interleaved
from fastattention.cli.bench.workload import BenchWorkload, Tensors, make_tensors
from fastattention.cli.console import first_line

_LIMIT = "the limit itself"  # is timed in turns with the peers


@dataclass(frozen=True)
class Measurement:
    """What one peer did with one workload: a timing and an error, or the reason why there are none."""

    workload: BenchWorkload
    peer: str
    detail: str = ""
    timing: Timing | None = None
    max_error: float | None = None
    reason: str | None = None
    limit_rate: float | None = None  # 10^9 a second: what the limiting loop did in turns with the peers

    @property
    def gflops(self) -> float | None:
        """10^9 multiplications and additions a second."""
        return None if self.timing is None else self.workload.flops / self.timing.median / 1e9

    @property
    def gbytes_per_s(self) -> float | None:
        """10^9 bytes of keys and values a second."""
        return None if self.timing is None else self.workload.cache_bytes / self.timing.median / 1e9


def measure(
    workload: BenchWorkload,
    peers: Iterable[Peer],
    seconds: float,
    on_progress: Callable[[float], None] = lambda fraction: None,
) -> list[Measurement]:
    """Check and time every peer that applies to `workload`, for about `seconds` in all.

    peers: available ones; their order is kept.
    """
    tensors = make_tensors(workload)
    prepared: dict[str, PreparedPeer] = {}
    results: dict[str, Measurement] = {}
    for peer in peers:
        if peer.applies_to(workload):
            results[peer.name] = _first_call(workload, tensors, peer, prepared)
    calls: dict[str, Callable[[], object]] = {name: ready.call for name, ready in prepared.items()}
    loop = limit_loop(workload.limit) if calls else None
    amount = 0.0
    if loop is not None:
        amount = loop()
        calls[_LIMIT] = loop
    timings = interleaved(calls, seconds, on_progress)
    limit_rate = None if loop is None else amount / timings[_LIMIT].median / 1e9
    return [replace(result, timing=timings.get(name), limit_rate=limit_rate) for name, result in results.items()]


def _first_call(
    workload: BenchWorkload, tensors: Tensors, peer: Peer, prepared: dict[str, PreparedPeer]
) -> Measurement:
    """Warm up, compare and add to `prepared`. A peer that fails, by lack of memory too, is left out with its reason."""
    reason = peer.why_not(workload)
    if reason is not None:
        return Measurement(workload, peer.name, reason=reason)
    try:
        ready = peer.prepare(workload, tensors)
        error = max_error(workload, tensors, ready.output(ready.call()))
    except (RuntimeError, MemoryError) as failure:
        return Measurement(workload, peer.name, reason=f"{type(failure).__name__}: {first_line(failure)}")
    prepared[peer.name] = ready
    return Measurement(workload, peer.name, ready.detail, max_error=error)
