"""The predicted gain of each strategy: an ablation, and the gain of two-level tiling by cause."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fastattention.backends.ascend.chips import Chip
from fastattention.backends.ascend.simulator.calibration import DEFAULT_COSTS, Costs
from fastattention.backends.ascend.simulator.tiles import Tiling
from fastattention.backends.ascend.simulator.whole_chip import ChipPrediction, predict
from fastattention.backends.ascend.simulator.workload import MaskMode, SimulatedCall, padded
from fastattention.backends.ascend.tiling import why_not_fit
from fastattention.errors import UnsupportedError

UNIFIED_TILE = 128  # queries and keys of FlashAttention's tile on a GPU
PAPER_PRELOAD, DEEPER_PRELOAD = 2, 4


@dataclass(frozen=True)
class AblationStep:
    """One more strategy than the step before."""

    name: str
    prediction: ChipPrediction
    gain: float  # over the step before; 1.0 for the first


@dataclass(frozen=True)
class Cause:
    """A part of a gain. The factors of all causes multiply to the whole gain."""

    name: str
    factor: float


def unified_tiling(workload: SimulatedCall, chip: Chip) -> Tiling:
    """FlashAttention as on a GPU: one small tile for both units, handed over each time, nothing computed ahead.

    UNIFIED_TILE or, where that does not fit the Vectors' buffers in one piece, the largest square tile that does; not
    more rows than there are. It counts as written by hand, like the kernels that it stands for.
    """
    for size in (UNIFIED_TILE, UNIFIED_TILE // 2, UNIFIED_TILE // 4, UNIFIED_TILE // 8):
        rows = min(size, padded(workload.num_rows))
        tiling = Tiling(rows, size, rows // chip.vectors_per_core, preload=1, multibuffer=True)
        if why_not_fit(tiling, workload.headdim, workload.headdim_v, workload.dtype, chip, by_hand=True) is None:
            return tiling
    raise UnsupportedError(f"headdim={workload.headdim} fits no buffers of {chip.name} at any tile size")


def ablation(workload: SimulatedCall, tiling: Tiling, chip: Chip) -> list[AblationStep]:
    """Unified tiling, two-level tiling, deeper preload and, under a mask, the tiling-mask, each on top of the last.

    `tiling` gives the two-level tiles. Until the tiling-mask comes, a masked workload has the ordinary full mask and
    computes hidden tiles; skipping these and reading no full mask are two steps.
    """
    before = replace(workload, mask_mode=MaskMode.FULL)
    paper, deeper = (replace(tiling, preload=preload) for preload in (PAPER_PRELOAD, DEEPER_PRELOAD))
    runs = [
        ("unified tiling", predict(before, unified_tiling(workload, chip), chip)),
        ("two-level tiling", predict(before, paper, chip)),
        ("+ deeper preload", predict(before, deeper, chip)),
    ]
    if workload.has_window:
        skipping = replace(workload, mask_mode=MaskMode.FULL_SKIPPING)
        runs.append(("+ tiling-mask: hidden tiles skipped", predict(skipping, deeper, chip)))
        tiling_mask = replace(workload, mask_mode=MaskMode.TILING)
        runs.append(("+ tiling-mask: no full mask read", predict(tiling_mask, deeper, chip)))
    before_each = [runs[0][1], *(prediction for _, prediction in runs)]
    return [
        AblationStep(name, prediction, earlier.seconds / prediction.seconds)
        for (name, prediction), earlier in zip(runs, before_each, strict=False)
    ]


def causes(workload: SimulatedCall, tiling: Tiling, chip: Chip) -> list[Cause]:
    """Why two-level tiling on the paper's schedule is faster than unified tiling.

    A chain of counterfactual kernels from one to the other, each with one cost less: the factors depend on the order,
    and multiply to the whole gain. Kernels between the ends need not fit a chip.
    """
    unified = unified_tiling(workload, chip)
    fewer = unified.outer_tile_n / tiling.outer_tile_n
    syncs = replace(DEFAULT_COSTS, handover=DEFAULT_COSTS.handover * fewer)
    products = replace(syncs, product_share=fewer)
    whole = tiling.outer_tile_m // chip.vectors_per_core
    blocks = replace(unified, outer_tile_m=tiling.outer_tile_m, inner_tile_m=whole)
    large = replace(blocks, outer_tile_n=tiling.outer_tile_n)
    sliced = replace(large, inner_tile_m=tiling.inner_tile_m)
    chain: list[tuple[str, Tiling, Costs]] = [
        ("", unified, DEFAULT_COSTS),
        ("number of synchronizations", unified, syncs),
        ("number of write-backs and updates of O", unified, products),
        ("row blocks of another height: other cores have work", blocks, products),
        ("overlap of pipes: longer stages of the Cube", large, DEFAULT_COSTS),
        ("overlap of pipes: slices of the Vector", sliced, DEFAULT_COSTS),
        ("overlap of Cube and Vector", replace(tiling, preload=PAPER_PRELOAD), DEFAULT_COSTS),
    ]
    seconds = [predict(workload, cut, chip, costs).seconds for _, cut, costs in chain]
    return [Cause(name, seconds[i] / seconds[i + 1]) for i, (name, _, _) in enumerate(chain[1:])]
