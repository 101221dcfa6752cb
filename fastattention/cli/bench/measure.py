"""One workload against all its peers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from fastattention.cli.bench.accuracy import max_error
from fastattention.cli.bench.peers import Peer, Prepared
from fastattention.cli.bench.timing import Timing, interleaved
from fastattention.cli.bench.workload import Tensors, Workload, make_tensors


@dataclass(frozen=True)
class Measurement:
    """What one peer did with one workload: a timing and an error, or the reason why there are none."""

    workload: Workload
    peer: str
    detail: str = ""
    timing: Timing | None = None
    max_error: float | None = None
    reason: str | None = None

    @property
    def gflops(self) -> float | None:
        """10^9 multiplications and additions a second."""
        return None if self.timing is None else self.workload.flops / self.timing.median / 1e9

    @property
    def gbytes_per_s(self) -> float | None:
        """10^9 bytes of keys and values a second."""
        return None if self.timing is None else self.workload.cache_bytes / self.timing.median / 1e9


def measure(
    workload: Workload,
    peers: Iterable[Peer],
    seconds: float,
    on_progress: Callable[[float], None] = lambda fraction: None,
) -> list[Measurement]:
    """Check and time every peer that applies to `workload`, for about `seconds` in all.

    peers: available ones; their order is kept.
    """
    tensors = make_tensors(workload)
    prepared: dict[str, Prepared] = {}
    results: dict[str, Measurement] = {}
    for peer in peers:
        if peer.applies_to(workload):
            results[peer.name] = _first_call(workload, tensors, peer, prepared)
    timings = interleaved({name: ready.call for name, ready in prepared.items()}, seconds, on_progress)
    return [
        Measurement(workload, name, result.detail, timings.get(name), result.max_error, result.reason)
        for name, result in results.items()
    ]


def _first_call(workload: Workload, tensors: Tensors, peer: Peer, prepared: dict[str, Prepared]) -> Measurement:
    """Warm up, compare and add to `prepared`. A peer that fails, by lack of memory too, is left out and says why."""
    reason = peer.why_not(workload)
    if reason is not None:
        return Measurement(workload, peer.name, reason=reason)
    try:
        ready = peer.prepare(workload, tensors)
        error = max_error(workload, tensors, ready.output(ready.call()))
    except (RuntimeError, MemoryError) as failure:
        first_line = next(iter(str(failure).splitlines()), "")
        return Measurement(workload, peer.name, reason=f"{type(failure).__name__}: {first_line}")
    prepared[peer.name] = ready
    return Measurement(workload, peer.name, ready.detail, max_error=error)
