"""Sensitivity of the predictions to figures that were guessed, or measured on GPUs other than Volta."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from . import kernels
from .chip import V100, Chip
from .launch import Problem
from .predict import Model
from .published import FIGURES
from .report import Assumption, Compared, Judged

# Every figure that chip.py marks ? or H, those of the L2 cache, and barriers: each is halved and doubled.
_UNCERTAIN = {
    "special_latency": "exponentials after {} cycles",
    "queue_length": "memory queue of {}",
    "queue_delay": "memory queue reached after {} cycles",
    "access_interval": "an access to memory every {} cycles",
    "transfer_width": "{} bytes a cycle between registers and memory",
    "read_latency": "operands read after {} cycles",
    "l2_latency": "L2 cache after {} cycles",
    "l2_gbps": "L2 cache with {} GB/s",
    "constant_latency": "constants after {} cycles",
    "barrier_latency": "barriers after {} cycles",
    "special_register_latency": "special registers after {} cycles",
    "branch_latency": "branches after {} cycles",
    "fetch_latency": "instruction fetch after {} cycles",
    "fetch_width": "instruction fetch {} bytes a cycle",
    "prefetch_lines": "{} lines of instructions fetched ahead",
    "launch_cycles": "launch in {} cycles",
}
# Figures that others have measured or may have.
_OTHERS = {
    "clock 1380 MHz (PCIe)": replace(V100, clock_mhz=1380),
    "m8n8k4 every 8 cycles": replace(V100, tensor_interval=2.0),
    "shared memory after 19 cycles": replace(V100, shared_latency=19),
    "half of what is loaded in the L1 cache": replace(V100, l1_share=0.5),
    "all of what is loaded in the L1 cache": replace(V100, l1_share=1.0),
}
# Tiles that are simulated, and problems: few, because there are many changes. With twice as many tiles, ratios and
# speeds have been found up to 5% away. "None" is simulated in the same way.
_TILES = (1, 3)
_SEQLEN = 4096


def changes() -> Iterator[tuple[str, Chip]]:
    """The names of changes, and the changed chips."""
    yield "none", V100
    for name, title in _UNCERTAIN.items():
        for factor in (0.5, 2.0):
            value = type(getattr(V100, name))(getattr(V100, name) * factor)
            yield title.format(f"{value:g}"), replace(V100, **{name: value})
    yield from _OTHERS.items()


def vary(headdims: Sequence[int]) -> Iterator[Assumption]:
    """The effect of each single change: the model's errors where nothing is masked, and the ratio of both kernels."""
    known = {headdim: (kernels.ours(headdim), kernels.theirs(headdim)) for headdim in headdims}
    return (_vary(change, chip, known) for change, chip in changes())


def _vary(change: str, chip: Chip, known: dict[int, tuple[Model, Model]]) -> Assumption:
    models = {
        headdim: tuple(Model(each.paths, each.launch, chip, _TILES) for each in both) for headdim, both in known.items()
    }
    figures = [figure for figure in FIGURES if figure.problem.seqlen == _SEQLEN and not figure.problem.causal]
    errors = [Judged(each, models[each.problem.headdim][1].predict(each.problem)).error for each in figures]
    ratios = []
    for headdim, (ours, theirs) in models.items():
        problem = Problem(seqlen=_SEQLEN, batch_size=4, nheads=2048 // headdim, headdim=headdim, causal=False)
        ratios.append(Compared(ours.predict(problem), theirs.predict(problem)).ratio)
    return Assumption(change, max(errors, key=abs), ratios)
