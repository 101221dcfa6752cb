"""The page of a simulator's predictions for an Ascend NPU."""

from __future__ import annotations

from typing import Any

from .markdown import error, number, page, ratio, table, tokens
from .results import Result

INTRODUCTION = """\
**No Ascend NPU has run our kernels.** Times and rates on this page are predicted by our simulator of Ascend chips,
except where a heading says measured. Others measured and published those times of NPUs. Two constants of the simulator
were fitted to published cycle counts, and none to the times of whole kernels. Predictions of whole chips were committed
before they were compared ([0068](../decisions/0068-share-the-l2-cache-in-the-ascend-simulator.md)). The measured times
were known when the model was built, so the validation is weaker evidence than a blind test.
[The simulator](../internals/ascend-simulator.md) explains the model. The last section measures our Triton kernel on an
H200, which says nothing of the speed of an NPU."""
PREDICTED = "none, predicted for Ascend chips"


def build() -> str:
    """ascend-plan.md."""
    result = Result.load("ascend_plan")
    predicted = result.sourced(*sections(result.data), device=PREDICTED)
    return page("Ascend: predictions", INTRODUCTION, *predicted, *_on_cuda())


def sections(data: dict[str, Any]) -> list[str]:
    """What is predicted, beside what others measured."""
    return [
        "## Calibration and validation",
        "Four stages for 128 queries and 256 keys of 128 in float16; the constants come from these.",
        _calibration(data["calibration"]),
        "Whole kernels on a 910B2, one head of 128, no mask, against times that others measured.",
        _validation(data["validation"]),
        "Few busy cores of a 910B2, one row block each, measured by others on two hosts. One and two cores are judged.",
        _few_cores(data["few_cores"]),
        "Not used to judge the model: dies of an A3, and models that each leave out one thing.",
        _not_judged(data["shown_not_judged"]),
        "## Two-level tiling against unified tiling",
        "One head of 128 on a 910B2, no mask. Ratios are to the column before.",
        _gains(data["gains"]),
        "### Where the gain comes from",
        "The factors multiply to the gain, and depend on their order.",
        _causes(data["gains"]),
        "### If the model is wrong",
        _sensitivity(data["sensitivity"]),
        "## Tiling-mask",
        "32 heads of 128, causal. Each column adds to the one before it. A gain of 1.00x or less is no gain.",
        _causal(data["gains_causal"]),
        "A mask of one byte an element, beside the mask that our kernel reads:",
        _mask(data["mask"]),
        "## Against attention that stores its scores",
        "32 heads of 128 on a 910B2. The other kernels are taken to be as fast as their busiest path, which flatters "
        'them. "Three kernels" fuses scale, mask and softmax; "eager" has a kernel for each operation.',
        _standard(data["standard"]),
        "## Rates",
        'Best tiles for 32K tokens, 32 heads, no mask, in TFLOPS. "By hand" leaves a compiler no room in its buffers. '
        "Chips called 910_93.. are dies of a 910C, each half of an A3's chip.",
        _rates(data["best"]),
    ]  # fmt: skip


def _calibration(records: list[dict[str, Any]]) -> str:
    rows = [
        [one["stage"], number(one["published_cycles"], 4), number(one["predicted_cycles"], 4), error(one["error"])]
        for one in records
    ]
    return table(["stage", "published cycles", "simulated cycles", "error"], rows)


def _validation(records: list[dict[str, Any]]) -> str:
    rows = [
        [
            tokens(one["seqlen"]),
            number(one["measured_us"]),
            number(one["predicted_us"]),
            error(one["error"]),
            number(one["measured_torch_npu_us"]),
        ]
        for one in records
    ]
    return table(["tokens", "measured, us", "predicted, us", "error", "torch_npu, measured, us"], rows)


def _few_cores(records: list[dict[str, Any]]) -> str:
    rows = []
    for one in records:
        measured, errors = [number(us) for us in one["measured_us"]], [error(found) for found in one["errors"]]
        case = f"{one['busy_cores']}, {tokens(one['seqlen_k'])}"
        rows.append([case, measured[0], measured[1], number(one["predicted_us"]), *errors])
    return table(["cores, keys", "host 1, us", "host 2, us", "predicted, us", "error, host 1", "error, host 2"], rows)


def _not_judged(records: list[dict[str, Any]]) -> str:
    rows = [
        [one["case"], number(one["measured_us"]), number(one["predicted_us"]), error(one["error"])] for one in records
    ]
    return table(["case", "measured, us", "predicted, us", "error"], rows)


def _gains(records: list[dict[str, Any]]) -> str:
    rows = []
    for one in records:
        unified, two_level, deeper = one["ablation"]
        tile = f"{one['tiling']['outer_tile_m']} x {one['tiling']['outer_tile_n']}"
        cells = [number(unified["predicted_us"]), number(two_level["predicted_us"]), ratio(two_level["gain"])]
        rows.append([tokens(one["seqlen"]), tile, *cells, number(deeper["predicted_us"]), ratio(deeper["gain"])])
    headings = ["tokens", "tiles", "unified 128 x 128, us", "two-level, us", "gain", "deeper preload, us", "gain"]
    return table(headings, rows, text_columns=2)


def _causes(records: list[dict[str, Any]]) -> str:
    shown = [one for one in records if one["seqlen"] in (8192, 32768)] or records[-1:]
    names = [cause["name"] for cause in shown[0]["causes"]]
    rows = []
    for index, name in enumerate(names):
        rows.append([name, *(ratio(one["causes"][index]["factor"]) for one in shown)])
    return table(["cause", *(tokens(one["seqlen"]) for one in shown)], rows)


def _sensitivity(records: list[dict[str, Any]]) -> str:
    rows = [
        [
            f"{tokens(one['seqlen'])}, {one['variant']}",
            number(one["predicted_unified_us"]),
            number(one["predicted_two_level_us"]),
            ratio(one["gain"]),
        ]
        for one in records
    ]
    return table(["tokens, variant", "unified, us", "two-level, us", "gain"], rows)


def _causal(records: list[dict[str, Any]]) -> str:
    rows = []
    for one in records:
        steps = one["ablation"]
        whole = steps[0]["predicted_us"] / steps[-1]["predicted_us"]
        gains = [ratio(step["gain"]) for step in steps[1:]]
        rows.append([tokens(one["seqlen"]), number(steps[0]["predicted_us"] / 1e3), *gains, ratio(whole)])
    headings = [step["strategy"].removeprefix("+ tiling-mask: ").removeprefix("+ ") for step in records[0]["ablation"]]
    return table(["tokens", f"{headings[0]}, ms", *headings[1:], "in all"], rows)


def _mask(records: list[dict[str, Any]]) -> str:
    rows = [
        [tokens(one["seqlen"]), *(number(one[f"{kind}_mask_bytes"] / 2**20) for kind in ("full", "tiling"))]
        for one in records
    ]
    return table(["tokens", "full mask, MiB", "tiling-mask, MiB"], rows)


def _standard(records: list[dict[str, Any]]) -> str:
    rows = []
    for one in records:
        case = f"{tokens(one['seqlen'])}, {'causal' if one['causal'] else 'no mask'}"
        cells = [number(one["predicted_ours_us"] / 1e3)]
        for kind in ("three kernels", "eager"):
            cells += [number(one[kind]["predicted_us"] / 1e3), ratio(one[kind]["gain"])]
        rows.append([case, *cells])
    return table(["tokens, mask", "ours, ms", "three kernels, ms", "ratio", "eager, ms", "ratio"], rows)


def _rates(records: list[dict[str, Any]]) -> str:
    rows: dict[tuple[str, str], dict[tuple[int, str], float]] = {}
    peaks = {one["chip"]: one["peak_tflops"] for one in records}
    for one in records:
        rows.setdefault((one["chip"], one["kernel"]), {})[one["headdim"], one["dtype"]] = one["predicted_tflops"]
    columns = [(headdim, dtype) for dtype in ("float16", "float32") for headdim in (64, 128, 256)]
    cells = [
        [f"{chip}, {kernel}", f"{peaks[chip]:.0f}", *(_rate(found.get(column)) for column in columns)]
        for (chip, kernel), found in rows.items()
    ]
    headings = ["chip, kernel", "peak, float16", *(f"heads of {headdim}, {dtype}" for headdim, dtype in columns)]
    return table(headings, cells)


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _on_cuda() -> list[str]:
    result = Result.load("ascend_on_cuda")
    rows = []
    for one in result.data["measurements"]:
        rates = one["tflops"]
        triton, flash = rates["Triton kernel"], rates.get("SDPA flash")
        mask = "causal" if one["causal"] else "full"
        length = "varlen" if one["tokens"] == "packed" else tokens(int(one["tokens"]))
        compared = [ratio(triton / rates["fastattention sm80"]), ratio(triton / flash if flash else None)]
        cells = [f"{one['headdim']}, {mask}, {length}", f"{triton:.0f}", f"{rates['fastattention sm80']:.0f}"]
        rows.append([*cells, _rate(flash), *compared])
    headings = ["heads of, mask, tokens", "Triton kernel", "our `cuda` backend", "FlashAttention-2"]
    return result.sourced(
        "## Our Triton kernel, measured on an H200",
        "The kernel that we wrote for NPUs, compiled by Triton for an NVIDIA GPU with tiles for it, in useful TFLOPS. "
        "16384 tokens in all, hidden size 2048, float16.",
        table([*headings, "vs our `cuda` backend", "vs FlashAttention-2"], rows),
    )
