"""The model's tables: published and predicted figures, then our kernel and PyTorch's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .predict import Prediction
from .published import Figure

LEFT_OUT = """\
- No power limit: all SMs keep the boost clock. Cards slow down when their tensor cores are busy most of the time:
  cuBLAS has been measured at 83 to 84 TFLOPS of 125. In the figures that the model is judged on, tensor cores are busy
  a third of the time, or little more: above 40% busy tensor cores nothing has been checked. Ours is predicted far
  above, CUTLASS is not; hence the ratio with ours derated and CUTLASS as it is, a pessimistic bound.
- Loads hit the L2 cache, none the first-level one; DRAM only bounds the whole kernel. CTAs of one head that
  share an SM could find each other's tiles in the first level, which would help CUTLASS's small tiles of queries most
  (see the last table). Only the stack hits the first level.
- No bank conflicts, of shared memory or registers. Ours has none of the former in its main loop, by the emulator's
  count (tests/cuda/test_bank_conflicts.py). CUTLASS's are not known; any would make it slower.
- Every tile of keys but those on the diagonal takes the steady path: none raises the maximum of a row. That costs ours
  some 160 issue cycles in the first tile and seldom later, CUTLASS nothing, since it always rescales.
- CTAs of a wave begin together, so that prologues and epilogues overlap each other rather than the main loop.
- The cache behind the schedulers' own instruction caches is guessed to give 64 bytes a cycle (see the last table).
  The loops of both kernels exceed the 12 KB of a scheduler's own."""


DERATING = 0.25  # a guess on the safe side: cuBLAS reaches 83 of 125 TFLOPS, a third less than the peak


@dataclass(frozen=True)
class Judged:
    """A published figure and its prediction."""

    figure: Figure
    prediction: Prediction

    @property
    def error(self) -> float:
        """Error of the prediction, relative to the measurement."""
        return self.prediction.tflops / self.figure.tflops - 1.0


@dataclass(frozen=True)
class Compared:
    """Predictions of both kernels for one problem."""

    ours: Prediction
    theirs: Prediction

    @property
    def ratio(self) -> float:
        """The speedup of our kernel."""
        return self.theirs.seconds / self.ours.seconds

    @property
    def derated_ratio(self) -> float:
        """The speedup if only our kernel missed its prediction by DERATING: a pessimistic bound."""
        return self.ratio * (1.0 - DERATING)


@dataclass(frozen=True)
class Assumption:
    """The effect of changing one figure of the chip."""

    change: str
    largest_error: float  # for the published figures of S 4096 without a mask
    ratios: Sequence[float]  # of predicted seconds at S 4096, PyTorch's over ours, one for each head dimension


def errors_line(judged: Iterable[Judged]) -> str:
    """Every error for the published figures, to print with predictions."""
    errors = ", ".join(f"{each.figure.problem.name} {each.error:+.1%}" for each in judged)
    return f"Errors of the model on the published V100 figures of PyTorch's CUTLASS kernel: {errors}."


def sources(judged: Iterable[Judged]) -> str:
    """Where the published figures come from."""
    return "\n".join(dict.fromkeys(f"Measured: {each.figure.source}." for each in judged))


def judged_table(judged: Iterable[Judged]) -> str:
    """Published, predicted, error, in Markdown."""
    rows = [
        (
            each.figure.problem.name,
            f"{each.prediction.tflops:.1f}",
            f"{each.figure.tflops:.1f}",
            f"{each.error:+.1%}",
            str(each.prediction.residents),
            f"{each.prediction.waves:.1f}",
            each.prediction.limit,
        )
        for each in judged
    ]
    return _table(
        ("problem", "predicted", "measured", "error", "CTAs an SM", "waves", "what limits it (predicted)"), rows
    )


def compared_table(compared: Iterable[Compared]) -> str:
    """Our kernel and PyTorch's, in Markdown."""
    rows = [
        (
            each.ours.problem.name,
            f"{each.ours.tflops:.1f}",
            f"{each.theirs.tflops:.1f}",
            f"{each.ratio:.2f}",
            f"{each.derated_ratio:.2f}",
            f"{each.ours.tile_cycles:.0f} / {each.ours.tensor_cycles:.0f}",
            f"{each.ours.unit_shares['shared']:.0%}",
            f"{each.ours.wave_efficiency:.0%}",
            each.ours.limit,
        )
        for each in compared
    ]
    head = (
        "problem",
        "ours, predicted",
        "CUTLASS, predicted",
        "ratio",
        f"ratio with ours {DERATING:.0%} slower than predicted, CUTLASS not",
        "cycles of a tile / of tensor cores",
        "shared memory busy",
        "full waves",
        "what limits ours (predicted)",
    )
    return _table(head, rows)


def assumptions_table(assumptions: Iterable[Assumption], headdims: Sequence[int]) -> str:
    """The effect of the guesses, in Markdown."""
    head = (
        "changed figure",
        "largest error on published at S4096, no mask",
        *(f"ratio at d{headdim}" for headdim in headdims),
    )
    rows = [
        (each.change, f"{each.largest_error:+.1%}", *(f"{ratio:.2f}" for ratio in each.ratios)) for each in assumptions
    ]
    return _table(head, rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] + ["--:"] * (len(head) - 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def as_json(
    judged: Iterable[Judged], compared: Iterable[Compared], assumptions: Iterable[Assumption]
) -> dict[str, Any]:
    """All results, every figure labelled predicted or measured."""
    return {
        "published": [
            {
                "measured_tflops": each.figure.tflops,
                "source": each.figure.source,
                "predicted": {"error": each.error, **asdict(each.prediction)},
            }
            for each in judged
        ],
        "predicted": {
            "compared": [
                {
                    "ratio": each.ratio,
                    "derated_ratio": each.derated_ratio,
                    "ours": asdict(each.ours),
                    "cutlass": asdict(each.theirs),
                }
                for each in compared
            ],
            "assumptions": [asdict(each) for each in assumptions],
        },
    }
