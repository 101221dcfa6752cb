"""The page of queries and keys that are multiplied in int8: errors, and times where they have been measured."""

from __future__ import annotations

from typing import Any

from . import results
from .markdown import page, ratio, seconds, table, tokens
from .results import Result

METHODS = ("int8", "int8, not smoothed", "bfloat16", "float16")
TIMES = {"int8_products_cpu": "Times on a CPU", "int8_products_gpu": "Times on a GPU"}
INTRODUCTION = """\
`qk_dtype="int8"` multiplies queries and keys as 8-bit integers: the one argument that trades exactness for speed.
[Numerics](../internals/numerics.md#products-in-int8) has the formula. Here is what it loses."""
ERRORS = """\
Errors are those of the output against exact attention in float64, causal: the mean over heads, in brackets the worst
head. Inputs are float32, so that int8 products are all that rounds. They were computed by the
{int8_by}. "Not smoothed" is the same formula with the mean left on the keys. Attention in bfloat16 and float16 is plain
torch's: q, k, v, scores and weights are rounded to 16 bits. Kernels that keep scores in float32 are closer."""
ROWS = """\
Random elements are normal, {heads} heads, {seqlen} tokens. "Offset" adds {offset:.0f} standard deviations to {channels}
channels of every key, or of every query. "Wide channels": {channels} are {wide:.0f} times as wide in keys, and as much
narrower in queries. The demo model (4 layers, 4 heads of 64, byte level) reads {tokens} bytes of a source file
that it has not seen: all layers and heads."""
COSINE = "Cosine similarity of a head's whole output, 1 at best:"
L1 = "Relative L1, the sum of absolute differences over that of absolute values:"
FINDINGS = """\
On normal elements at headdim 128 the relative L1 is {normal:.1f} times that of bfloat16, and on the demo model
{demo:.1f} times. An offset that all keys share costs nothing with smoothing; without it the error is
{offset[0]:.1%} instead of {offset[1]:.1%}. Smoothing does not help wide channels ({wide:.1%}), nor an offset in queries
({queries:.1%}): there one scale serves large and small elements alike."""
MODEL = """\
The demo model reads the same text with each kind of attention in every layer. "Same next byte" is the share of
{tokens} positions where the most likely next byte is that of exact attention."""
MODEL_FINDINGS = """\
int8 products change the loss by {int8:+.3%}, without smoothing by {not_smoothed:+.3%}; bfloat16 changes it by
{bfloat16:+.3%}. This is a small model and one text: measure your own."""
TIMES_TEXT = """\
The same call with and without `qk_dtype="int8"`, in turns in one process; **bold** ratios are losses. Queries and keys
become int8 in every call, which the times include."""
AT_MOST = """\
"At most" estimates what products that cost nothing would save: the softmax and the product with values remain. It is
measured with int8 products of 4 elements; noise may exceed it. Calls of few queries are slower, and not shown."""
GPU_PATHS = """\
Products of int8 take half the time of float16 here, but a call of 4096 tokens has too few of them to pay for making
them. The path sm75 is Turing's, timed on a newer GPU, whose int8 instructions of that age are slow. No T4 has run it
([what it should gain there](../decisions/0065-multiply-queries-and-keys-in-int8.md))."""


def build() -> str:
    """int8-products.md."""
    result = Result.load("int8_errors")
    times = [block for name, heading in TIMES.items() for block in _times(name, heading)]
    return page("int8 products", INTRODUCTION, *result.sourced(*losses(result.data)), *times)


def losses(data: dict[str, Any]) -> list[str]:
    """Errors, and what a model loses."""
    return [*_errors(data), *_model(data["model"])]


def relative_l1(data: dict[str, Any], numbers: str, method: str, headdim: int = 128) -> float:
    """The relative L1 error, averaged over heads."""
    (error,) = (
        float(one["relative_l1"])
        for one in data["errors"]
        if (one["numbers"], one["method"], one["headdim"]) == (numbers, method, headdim)
    )
    return error


def _errors(data: dict[str, Any]) -> list[str]:
    made = data["errors"][0]
    what = ROWS.format(heads=made["heads"], seqlen=made["seqlen"], tokens=data["model"]["tokens"], **data["outliers"])
    int8, plain, bfloat16, _ = METHODS
    findings = FINDINGS.format(
        normal=relative_l1(data, "normal", int8) / relative_l1(data, "normal", bfloat16),
        demo=relative_l1(data, "demo model", int8, 64) / relative_l1(data, "demo model", bfloat16, 64),
        offset=[relative_l1(data, "offset in keys", method) for method in (plain, int8)],
        wide=relative_l1(data, "wide channels in keys", int8),
        queries=relative_l1(data, "offset in queries", int8),
    )
    cosine = _error_table(data["errors"], "cosine", "{:.6f} ({:.6f})")
    l1 = _error_table(data["errors"], "relative_l1", "{:.2%} ({:.2%})")
    text = ERRORS.format(int8_by=data["int8_by"])
    return ["## Errors", text, what, COSINE, cosine, L1, l1, findings]


def _error_table(errors: list[dict[str, Any]], name: str, cell: str) -> str:
    rows: dict[tuple[str, int], list[str]] = {}
    for one in errors:
        row = rows.setdefault((one["numbers"], one["headdim"]), [one["numbers"], str(one["headdim"])])
        row.append(cell.format(one[name], one[f"{name}_worst_head"]))
    return table(["elements", "headdim", *METHODS], rows.values())


def _model(model: dict[str, Any]) -> list[str]:
    exact = model["exact_bits"]
    more = {one["method"]: one["bits"] / exact - 1 for one in model["records"]}
    rows = [["exact", f"{exact:.5f}", "-", "-"]]
    for one in model["records"]:
        rows.append([one["method"], f"{one['bits']:.5f}", f"{more[one['method']]:+.3%}", f"{one['agreement']:.2%}"])
    findings = MODEL_FINDINGS.format(
        int8=more["int8"], not_smoothed=more["int8, not smoothed"], bfloat16=more["bfloat16"]
    )
    return [
        "## What a model loses", MODEL.format(tokens=model["tokens"]),
        table(["attention", "bits per byte", "change", "same next byte"], rows), findings,
    ]  # fmt: skip


def _times(name: str, heading: str) -> list[str]:
    """A section of times; empty where they have not been measured."""
    if not (results.RESULTS / f"{name}.json").exists():
        return []
    result = Result.load(name)
    what = f"{TIMES_TEXT} {GPU_PATHS if result.machine['gpus'] else AT_MOST}"
    return result.sourced(f"## {heading}", what, times(result.data["records"]))


def times(records: list[dict[str, Any]]) -> str:
    """With and without int8 products."""
    rows = []
    for one in records:
        exact, int8, rest = one["seconds"]["exact"], one["seconds"]["int8"], one["seconds"].get("rest")
        causal = "causal" if one["causal"] else "not causal"
        call = f"{one['dtype']}, {one['nheads']} heads of {one['headdim']}, {tokens(one['seqlen'])} tokens, {causal}"
        most = [f"{exact / rest:.2f}x"] if rest else []
        rows.append([one["path"], call, seconds(exact), seconds(int8), ratio(exact / int8), *most])
    columns = ["kernels", "call", "exact", "int8", "exact / int8", "at most"]
    return table(columns[: max(map(len, rows), default=len(columns))], rows, text_columns=2)
