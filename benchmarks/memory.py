"""How much memory do a prefill and its backward take beyond their inputs, and how does that grow with the length?

    python benchmarks/memory.py

Every number comes from a process of its own: bfloat16 q, k and v of 4 heads of 64 are resident, the peak of resident
memory is reset, one causal attention runs, and the rise of the peak is reported. It includes the result, whose size is
shown too. The result of a backward is the gradients of q, k and v; tensors that the forward keeps are resident before.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from harness import RESULTS, publish, run_again
from pages import cpu

from fastattention.cli import peak_memory
from fastattention.cli.bench.peers import EAGER, FASTATTENTION, SDPA, Peer
from fastattention.cli.bench.record import title
from fastattention.cli.bench.workload import BenchWorkload, Kind, make_tensors
from fastattention.cli.console import fail, progress_bar
from fastattention.cli.machine import describe_machine

PEERS: dict[Kind, dict[str, Peer]] = {
    "prefill": {peer.name: peer for peer in (FASTATTENTION, SDPA, EAGER)},
    "backward": {peer.name: peer for peer in (FASTATTENTION, SDPA)},
}
NHEADS, HEADDIM = 4, 64
WARM_UP_SEQLEN = 64


@dataclass(frozen=True)
class Peak:
    """Bytes of one call; extra_bytes is None for one that was not run, and then `reason` says why."""

    kind: Kind
    peer: str
    seqlen: int
    result_bytes: int
    extra_bytes: int | None = None
    reason: str | None = None


def main(
    shortest: int = 1024,
    longest: int = 65536,
    output: Path = RESULTS,
    only: Annotated[
        tuple[str, str, int] | None, typer.Option(hidden=True, help="Measure this kind, peer and length here.")
    ] = None,
) -> None:
    """Double the length from `shortest` to `longest`; write memory.json and memory.png into `output`."""
    if only is not None:
        print(json.dumps(asdict(measure_here(*only))))
        return
    reason = peak_memory.why_unavailable()
    if reason is not None:
        raise fail(reason)
    seqlens = [shortest << step for step in range((longest // shortest).bit_length())]
    cases = [(kind, peer, seqlen) for kind, peers in PEERS.items() for seqlen in seqlens for peer in peers]
    with progress_bar() as bar:
        peaks = [measure_in_process(*case) for case in bar.track(cases, description="peak memory")]
    figures: dict[str, Any] = {"machine": describe_machine(), "peaks": [asdict(peak) for peak in peaks]}
    forward = [peak for peak in peaks if peak.kind == "prefill"]
    picture = partial(draw, forward, f"memory: {title(figures['machine'])}")
    publish(output / "memory.json", figures, *cpu.peaks(figures), draw=picture)


def make_workload(kind: str, seqlen: int) -> BenchWorkload:
    """The problem that is measured."""
    return BenchWorkload(cast(Kind, kind), "bfloat16", (seqlen,), (seqlen,), NHEADS, NHEADS, HEADDIM, causal=True)


def measure_here(kind: str, peer: str, seqlen: int) -> Peak:
    """The rise of this process's peak in one call, after a short one that starts threads and loads code."""
    for length in (WARM_UP_SEQLEN, seqlen):
        workload = make_workload(kind, length)
        prepared = PEERS[workload.kind][peer].prepare(workload, make_tensors(workload))
        peak_memory.reset_peak()
        before = peak_memory.resident_bytes()
        result = prepared.call()  # kept until the peak is read
        extra_bytes = peak_memory.peak_bytes() - before
    del result
    return Peak(workload.kind, peer, seqlen, size_of_result(kind, seqlen), extra_bytes)


def size_of_result(kind: str, seqlen: int) -> int:
    """Bytes of out, or of the gradients of q, k and v."""
    return seqlen * NHEADS * HEADDIM * 2 * (3 if kind == "backward" else 1)


def measure_in_process(kind: Kind, peer: str, seqlen: int) -> Peak:
    """`measure_here` in a fresh process, unless the machine lacks the memory for it."""
    result_bytes = size_of_result(kind, seqlen)
    needed, available = seqlen**2 * NHEADS * (2 + 4 + 2), available_bytes()  # scores, float32 softmax, weights
    if peer == EAGER.name and needed > available // 2:
        reason = f"needs about {needed / 2**30:.0f} GiB, {available / 2**30:.0f} GiB are available"
        return Peak(kind, peer, seqlen, result_bytes, reason=reason)
    # Without the threshold glibc keeps freed memory resident, and a later allocation would not show.
    return Peak(**run_again(__file__, "--only", kind, peer, str(seqlen), MALLOC_MMAP_THRESHOLD_="65536"))


def available_bytes() -> int:
    """Bytes that can be allocated without swapping, as the system reports."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))


def draw(peaks: list[Peak], heading: str, path: Path) -> None:
    """One line a peer on logarithmic axes, the size of the result dashed."""
    from matplotlib.figure import Figure  # not imported in the measuring processes

    figure = Figure(figsize=(8.5, 5), layout="constrained")
    panel = figure.subplots()
    for peer in PEERS["prefill"]:
        measured = [peak for peak in peaks if peak.peer == peer and peak.extra_bytes is not None]
        megabytes = [(peak.extra_bytes or 0) / 1e6 for peak in measured]
        panel.plot([peak.seqlen for peak in measured], megabytes, marker="o", label=peer)
        for peak, value in zip(measured, megabytes, strict=True):
            panel.annotate(f"{value:.3g}", (peak.seqlen, value), (0, 5), textcoords="offset points", fontsize=7)
    results = {peak.seqlen: peak.result_bytes / 1e6 for peak in peaks}
    panel.plot(list(results), list(results.values()), "--", color="gray", label="the result itself")
    panel.set(xscale="log", yscale="log", xlabel="tokens", ylabel="peak extra memory, MB")
    panel.set_xticks(list(results), [str(seqlen) for seqlen in results])
    panel.minorticks_off()
    panel.set_title(f"{heading}\nbfloat16 causal prefill, {NHEADS} heads of {HEADDIM}", fontsize=10)
    panel.legend()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    typer.run(main)
