"""How much the predictions depend on figures that were guessed, or measured on other GPUs than Volta."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from . import kernels
from .chip import V100, Chip
from .launch import Problem
from .predict import Model
from .published import FIGURES
from .report import Assumption

# Half and twice what the model takes, or the other value that somebody has measured.
CHANGES: dict[str, Chip] = {
    "none": V100,
    "clock 1380 MHz (PCIe)": replace(V100, clock_mhz=1380),
    "m8n8k4 every 8 cycles": replace(V100, tensor_interval=2.0),
    "instruction fetch 32 bytes a cycle": replace(V100, fetch_width=32),
    "instruction fetch 16 bytes a cycle": replace(V100, fetch_width=16),
    "memory queue of 10": replace(V100, queue_length=10),
    "exponentials after 36 cycles": replace(V100, special_latency=36),
    "shared memory after 19 cycles": replace(V100, shared_latency=19),
    "second-level cache after 420 cycles": replace(V100, l2_latency=420),
    "second-level cache half as fast": replace(V100, l2_gbps=V100.l2_gbps / 2),
    "barriers after 44 cycles": replace(V100, barrier_latency=44),
}


def vary(headdims: Sequence[int]) -> list[Assumption]:
    """Each change by itself: the model's largest error then, and the ratio of both kernels at S 4096."""
    paths = {headdim: (kernels.ours(headdim), kernels.theirs(headdim)) for headdim in headdims}
    return [_vary(change, chip, paths) for change, chip in CHANGES.items()]


def _vary(change: str, chip: Chip, known: dict[int, tuple[Model, Model]]) -> Assumption:
    models = {
        headdim: tuple(Model(each.paths, each.launch, chip=chip) for each in both) for headdim, both in known.items()
    }
    errors = [models[each.problem.headdim][1].predict(each.problem).tflops / each.tflops - 1.0 for each in FIGURES]
    ratios = []
    for headdim, (ours, theirs) in models.items():
        problem = Problem(seqlen=4096, batch_size=4, nheads=2048 // headdim, headdim=headdim, causal=False)
        ratios.append(theirs.predict(problem).seconds / ours.predict(problem).seconds)
    return Assumption(change, max(errors, key=abs), ratios)
