"""The page of predictions for a V100, by machine code and a model of an SM."""

from __future__ import annotations

from typing import Any

from .markdown import error, number, page, ratio, table
from .results import Result

INTRODUCTION = """\
**No V100 has run our kernels.** Our figures on this page are counted in machine code, or predicted by a model of one
multiprocessor. Measured ones are by others. The model is judged on PyTorch's CUTLASS kernel, which it
predicts up to {largest:.0%} too fast. It has no power limit and no bank conflicts. It is unchecked where tensor cores
are busy more than about 40% of the time, as ours are predicted to be. So the last ratio assumes that our kernel alone
misses its prediction by 25%. [Volta](../internals/volta.md) explains the kernel and how to check it."""
BACKWARD = """\
Our backward beside the kernel of PyTorch's own CUTLASS, for a tile without a mask. A backward usefully has five
products; ours compute seven at heads of 64 and eight at 128, as several kernels whose figures add up here. Counts are
for 512 useful tensor cycles of a warp. Predictions are the model's for the steady loop; contention for CUTLASS's
locks, its fences and bank conflicts are left out, in its favour. No backward of a V100 has been published to judge
the model by. **Bold** ratios are losses."""
PREDICTED = "none, predicted for a V100 of 80 SMs at 1530 MHz"
COUNTED = "none, counted in sm_70 machine code"


def build() -> str:
    """volta-model.md."""
    model, counts = Result.load("volta_model"), Result.load("volta_issue_cycles")
    backward = Result.load("volta_backward")
    largest = max(abs(one["predicted"]["error"]) for one in model.data["published"])
    return page(
        "Volta: predictions",
        INTRODUCTION.format(largest=largest),
        *model.sourced(
            "## The model against published measurements",
            "PyTorch's CUTLASS kernel on a V100, in useful TFLOPS. Library version, module and clock were not "
            "published.",
            _published(model.data["published"]),
            "## Our kernel and PyTorch's, predicted",
            "16384 tokens in all, hidden size 2048, float16, in useful TFLOPS. **Bold** ratios are losses.",
            _compared(model.data["predicted"]["compared"]),
            "## If the figures of the chip are wrong",
            "Half and twice each figure that is not known for certain, at 4096 tokens without a mask. Differences of "
            "5% and less mean nothing. The error is the largest one on the published measurements.",
            _assumptions(model.data["predicted"]["assumptions"]),
            device=PREDICTED,
        ),
        *counts.sourced(
            "## Issue cycles",
            f"Counts for a tile of keys without a mask, per {counts.data['tensor_cycles']} tensor cycles of a warp "
            "from the issue cycles on. They are counts, not times.",
            _counts(counts.data["kernels"]),
            device=COUNTED,
        ),
        *backward.sourced("## Backward", BACKWARD, _backward(backward.data["headdims"]), device=COUNTED),
    )


def _problem(problem: dict[str, Any]) -> str:
    mask = "causal" if problem["causal"] else "full"
    return f"{problem['headdim']}, {mask}, {problem['batch_size']} x {problem['seqlen']}, {problem['nheads']} heads"


def _published(records: list[dict[str, Any]]) -> str:
    rows = []
    for one in records:
        predicted = one["predicted"]
        rates = [number(one["measured_tflops"]), number(predicted["tflops"]), error(predicted["error"])]
        rows.append([_problem(predicted["problem"]), *rates, f"{predicted['unit_shares']['tensor']:.0%}"])
    return table(["heads of, mask, tokens", "measured", "predicted", "error", "tensor cores busy"], rows)


def _compared(records: list[dict[str, Any]]) -> str:
    rows = []
    for one in records:
        ours, theirs = one["ours"], one["cutlass"]
        shares = [f"{ours['unit_shares'][name]:.0%}" for name in ("tensor", "shared")]
        ratios = [ratio(one["ratio"]), ratio(one["derated_ratio"])]
        rows.append([_problem(ours["problem"]), number(ours["tflops"]), number(theirs["tflops"]), *ratios, *shares])
    headings = ["heads of, mask, tokens", "ours", "CUTLASS", "ratio", "ratio if ours is 25% slower"]
    return table([*headings, "our tensor cores busy", "our shared memory busy"], rows)


def _assumptions(records: list[dict[str, Any]]) -> str:
    rows = [[one["change"], error(one["largest_error"]), *(ratio(value) for value in one["ratios"])] for one in records]
    return table(["changed figure", "largest error", "ratio, heads of 64", "ratio, heads of 128"], rows)


def _counts(kernels: list[dict[str, Any]]) -> str:
    rows = [[name, *(_count(kernel["table"][name]) for kernel in kernels)] for name in kernels[0]["table"]]
    return table(["", *(kernel["title"] for kernel in kernels)], rows)


def _backward(records: list[dict[str, Any]]) -> str:
    rows = []
    for one in records:
        ours, theirs = one["ours_together"], one["pytorch"]
        for what in ("tensor cycles", "instructions", "issue cycles"):
            pair = ours["useful"][what], theirs["useful"][what]
            rows.append([f"heads of {one['headdim']}: {what}", *map(number, pair), ratio(pair[1] / pair[0])])
        rates = ours["predicted_tflops"], one["pytorch_predicted_tflops"]
        rows.append(
            [f"heads of {one['headdim']}: useful TFLOPS, predicted", *map(number, rates), ratio(rates[0] / rates[1])]
        )
    return table(["", "ours", "CUTLASS", "times better"], rows)


def _count(value: str | float) -> str:
    if isinstance(value, str):
        return value
    return number(value) if value % 1 else str(int(value))
