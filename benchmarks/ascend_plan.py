"""What would an Ascend NPU do, and what does each of the paper's strategies gain there? Predicted; needs no NPU.

    python benchmarks/ascend_plan.py

The simulator's constants come from published cycle counts of single stages. Its predictions of whole kernels are
compared with published latencies, to which nothing was fitted. Everything else has not run on an Ascend device.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import typer
from harness import RESULTS, publish
from pages import ascend_plan

from fastattention.backends.ascend.chips import CHIPS, Chip
from fastattention.backends.ascend.mask_tile import MASK_TILE
from fastattention.backends.ascend.simulator import published
from fastattention.backends.ascend.simulator.calibration import DEFAULT_COSTS, PUBLISHED_STAGES, Costs
from fastattention.backends.ascend.simulator.gains import PAPER_PRELOAD, ablation, causes, unified_tiling
from fastattention.backends.ascend.simulator.standard import StandardKind, predict_standard
from fastattention.backends.ascend.simulator.tiles import Tiling
from fastattention.backends.ascend.simulator.whole_chip import predict, simulated_operations
from fastattention.backends.ascend.simulator.workload import SimulatedCall
from fastattention.backends.ascend.tiling import tiling_for
from fastattention.cli.console import errors_as_messages

CHIP = published.MEASURED_CHIP
HARDWARE_HANDOVER = 1000  # cycles: the other published figure of a synchronization, fitted to hardware
DRAWN_MICROSECONDS, DRAWN_TILES = 14.0, 12
NHEADS = 32  # heads of the problems that fill every core

Record = dict[str, Any]


def main(longest: int = 131072, output: Path = RESULTS) -> None:
    """Lengths from 1K to `longest`; write ascend_plan.json and two pictures into `output`."""
    with errors_as_messages():
        seqlens = [1024 << step for step in range((longest // 1024).bit_length())]
        record: Record = {
            "note": "Times and rates are predicted by a simulator, except where a name begins with measured.",
            "chip": asdict(CHIP),
            "costs": asdict(DEFAULT_COSTS),
            "calibration": calibration(),
            "validation": validation(),
            "few_cores": few_cores(),
            "shown_not_judged": not_judged(),
            "gains": [gains(published.single_head(seqlen)) for seqlen in seqlens],
            "gains_causal": [gains(many_heads(seqlen, causal=True)) for seqlen in seqlens],
            "sensitivity": sensitivity(),
            "standard": [standard(seqlen, causal) for causal in (False, True) for seqlen in seqlens],
            "mask": [mask(seqlen) for seqlen in seqlens],
            "best": list(best()),
        }
        publish(output / "ascend_plan.json", record, *ascend_plan.sections(record))
        draw(output)


def many_heads(
    seqlen: int, causal: bool = False, headdim: int = 128, dtype: torch.dtype = torch.float16
) -> SimulatedCall:
    """A prompt with as many heads as a 7B model."""
    right = 0 if causal else -1
    return SimulatedCall(1, seqlen, seqlen, NHEADS, NHEADS, headdim, headdim, dtype, window_right=right)


def calibration() -> list[Record]:
    """Single stages, compared with the published cycle counts."""
    simulated, errors = published.simulated_stages(), published.residuals()
    return [
        {"stage": stage, "published_cycles": cycles, "predicted_cycles": simulated[stage], "error": errors[stage]}
        for stage, cycles in PUBLISHED_STAGES.items()
    ]


def validation() -> list[Record]:
    """Whole kernels, compared with the published latencies."""
    return [
        {
            "seqlen": one.seqlen,
            "measured_us": one.measured.open_kernel,
            "predicted_us": one.prediction.seconds * 1e6,
            "error": one.error,
            "allowed_error": one.allowed,
            "measured_torch_npu_us": one.measured.torch_npu,
        }
        for one in published.validate()
    ]


def few_cores() -> list[Record]:
    """One to sixteen busy cores, on two hosts."""
    return [
        {
            "seqlen_q": one.seqlen_q,
            "seqlen_k": one.seqlen_k,
            "busy_cores": one.cores,
            "measured_us": one.measured,
            "predicted_us": one.prediction.seconds * 1e6,
            "errors": one.errors,
        }
        for one in published.validate_few_cores()
    ]


def not_judged() -> list[Record]:
    """Other published figures, of an A3; and the validation of models that each leave out one effect."""
    records = []
    for name, (seqlen, measured) in itertools.product(published.A3_DIES, published.A3.items()):
        call, costs = published.of_a3(seqlen), published.MEASURED_COSTS
        predicted = predict(call, published.MEASURED_TILING, CHIPS[name], costs).seconds * 1e6
        records.append({"case": f"die of an A3, if a {name}, 12 heads, {seqlen}", **_compared(predicted, measured)})
    without_limit = replace(CHIP, l2_bytes_per_second=math.inf)
    own_ports = replace(CHIP, l2_read_rate=2 * CHIP.l2_read_rate, l2_write_rate=2 * CHIP.l2_write_rate)
    models = {
        "without first writes": (CHIP, DEFAULT_COSTS),
        "without a limit of the L2 cache": (without_limit, published.MEASURED_COSTS),
        "with ports twice as fast": (own_ports, published.MEASURED_COSTS),
        "with the nominal rate of writes": (CHIP, replace(published.MEASURED_COSTS, write_share=1.0)),
    }
    for model, (chip, costs) in models.items():
        for seqlen, (measured, _) in published.MEASURED.items():
            predicted = predict(published.single_head(seqlen), published.MEASURED_TILING, chip, costs).seconds * 1e6
            records.append({"case": f"{seqlen} {model}", **_compared(predicted, measured)})
    return records


def _compared(predicted: float, measured: float) -> Record:
    return {"measured_us": measured, "predicted_us": predicted, "error": predicted / measured - 1}


def gains(workload: SimulatedCall) -> Record:
    """The gain of each strategy, and the causes of that of two-level tiling, with the chosen tiles."""
    tiling = tiling_for(workload, CHIP)
    steps = ablation(workload, tiling, CHIP)
    return {
        "seqlen": workload.seqlen_k,
        "nheads": workload.nheads,
        "causal": workload.has_window,
        "unified_tiling": asdict(unified_tiling(workload, CHIP)),
        "tiling": asdict(tiling),
        "ablation": [
            {
                "strategy": step.name,
                "predicted_us": step.prediction.seconds * 1e6,
                "predicted_tflops": step.prediction.tflops,
                "gain": step.gain,
            }
            for step in steps
        ],
        "causes": [asdict(cause) for cause in causes(workload, tiling, CHIP)],
        "pipes_busy": {" ".join(pipe): share for pipe, share in steps[-1].prediction.busy.items()},
    }


def sensitivity() -> list[Record]:
    """The gain of two-level over unified tiling under changed assumptions, for one head of 8K and 32K."""
    found = []
    for seqlen in (8192, 32768):
        workload = published.single_head(seqlen)
        unified = unified_tiling(workload, CHIP)
        paper = replace(tiling_for(workload, CHIP), preload=PAPER_PRELOAD)
        sliced = replace(unified, inner_tile_m=published.MEASURED_TILING.inner_tile_m)
        variants: dict[str, tuple[Tiling, Tiling, Costs]] = {
            "as chosen": (unified, paper, DEFAULT_COSTS),
            "the measured kernel's 256 keys a tile": (unified, published.MEASURED_TILING, DEFAULT_COSTS),
            "synchronization of 1000 cycles": (unified, paper, replace(DEFAULT_COSTS, handover=HARDWARE_HANDOVER)),
            "synchronization for nothing": (unified, paper, replace(DEFAULT_COSTS, handover=0.0)),
            "unified tiling has slices too": (sliced, paper, DEFAULT_COSTS),
            "unified tiling has slices and one tile ahead too": (
                replace(sliced, preload=PAPER_PRELOAD),
                paper,
                DEFAULT_COSTS,
            ),
        }
        for name, (before, after, costs) in variants.items():
            seconds = [predict(workload, tiling, CHIP, costs).seconds for tiling in (before, after)]
            found.append(
                {
                    "seqlen": seqlen,
                    "variant": name,
                    "predicted_unified_us": seconds[0] * 1e6,
                    "predicted_two_level_us": seconds[1] * 1e6,
                    "gain": seconds[0] / seconds[1],
                }
            )
    return found


def standard(seqlen: int, causal: bool) -> Record:
    """Attention that stores its scores, compared with ours."""
    workload = many_heads(seqlen, causal)
    ours = predict(workload, tiling_for(workload, CHIP), CHIP).seconds
    record: Record = {"seqlen": seqlen, "causal": causal, "predicted_ours_us": ours * 1e6}
    for kind in StandardKind:
        theirs = predict_standard(workload, CHIP, kind)
        record[kind.value] = {
            "predicted_us": theirs.seconds * 1e6,
            "gain": theirs.seconds / ours,
            "score_bytes": theirs.score_bytes,
        }
    return record


def mask(seqlen: int) -> Record:
    """Bytes of the mask of a causal call."""
    return {"seqlen": seqlen, "tiling_mask_bytes": MASK_TILE**2, "full_mask_bytes": seqlen**2}


def best() -> Iterator[Record]:
    """The fastest plan of every chip, head dimension and dtype at 32K.

    On a 910B2 also a kernel written by hand, which needs no room for a compiler, and one with float16 scores.
    """
    for chip in CHIPS.values():
        for headdim in (64, 128, 256):
            for dtype in (torch.float16, torch.float32):
                workload = many_heads(32768, headdim=headdim, dtype=dtype)
                yield _best(workload, tiling_for(workload, chip), chip, "ours")
    for headdim in (64, 128, 256):
        workload = many_heads(32768, headdim=headdim)
        tiling = tiling_for(workload, CHIP, by_hand=True)
        yield _best(workload, tiling, CHIP, "by hand")
        yield _best(replace(workload, score_bytes=2), tiling, CHIP, "by hand, float16 scores")


def _best(workload: SimulatedCall, tiling: Tiling, chip: Chip, kernel: str) -> Record:
    prediction = predict(workload, tiling, chip)
    return {
        "kernel": kernel,
        "chip": chip.name,
        "peak_tflops": chip.peak_tflops,
        "headdim": workload.headdim,
        "dtype": str(workload.dtype).removeprefix("torch."),
        "tiling": asdict(tiling),
        "predicted_tflops": prediction.tflops,
        "fraction_of_peak": prediction.fraction_of_peak,
    }


def draw(output: Path) -> None:
    """Both tilings over the same time span, the two-level one on the paper's schedule."""
    from fastattention.cli.plan.ascend_picture import write_picture

    workload = published.single_head(8192)
    cycles = DRAWN_MICROSECONDS * CHIP.clock_hz / 1e6
    pictures: list[tuple[str, str, Tiling]] = [
        ("unified", "Unified tiling", unified_tiling(workload, CHIP)),
        ("two_level", "Two-level tiling on the paper's schedule", published.MEASURED_TILING),
    ]
    for name, heading, tiling in pictures:
        operations = simulated_operations(workload, tiling, CHIP, DRAWN_TILES)
        written = [one for one in operations if (one.stage, one.unit, one.pipe) == ("PV", "Cube", "FIX")]
        done = {one.tile for one in written if one.end <= cycles}
        keys = len(done - {one.tile for one in written if one.end > cycles}) * tiling.outer_tile_n
        heading = f"{heading}: {keys} keys multiplied with their values in {DRAWN_MICROSECONDS:.0f} microseconds"
        write_picture(operations, tiling, CHIP, heading, output / f"ascend_plan_{name}.png", cycles)


if __name__ == "__main__":
    typer.run(main)
