"""The page of int8 and float8 caches."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from .markdown import page, ratio, seconds, table
from .results import Result

CACHES = ("int8", "float8", "float16", "bfloat16")
INTRODUCTION = """\
A cache of int8 or float8 (e4m3) has one float32 scale a token and head. The first table says what storing costs: the
error against the values before they were stored, with q in float32 so that nothing else rounds. The demo model reads a
source file that it has not seen. The other rows are normal values in which four channels may be 20 to 50 times the
others. The second table says what arithmetic costs, given what is stored. Times are medians of calls that take turns
on a shared virtual machine; **bold** ratios are losses. No T4, V100 or P100 has been measured."""


def build() -> str:
    """quantized-caches.md."""
    result = Result.load("quantized_cache")
    return page(
        "Quantized caches",
        INTRODUCTION,
        *result.sourced(*sections(result.data)),
        "## Decode on a GPU",
        "Quantized caches on an H200 and an H100 are on the page [GPU: decode](gpu-decode.md).",
    )


def sections(data: dict[str, Any]) -> list[str]:
    """Errors and times."""
    return [
        "## What storing costs",
        "In units of the output's root mean square: the largest error, and the root mean square error in brackets.",
        _errors(data["errors"]),
        "## What arithmetic costs",
        "A decode of 4096 keys, 32 heads on 8 of 128: the largest error, and the root mean square error in brackets.",
        _arithmetic(data["arithmetic"]),
        "## Decode on a CPU",
        _times(data["times"]),
    ]


def _errors(records: list[dict[str, Any]]) -> str:
    rows = []
    for numbers, group in groupby(records, key=lambda one: one["numbers"]):
        found = {one["cache"]: one for one in group}
        unit = found["int8"]["rms_out"]
        rows.append([numbers, *(_pair(found[name]["max"] / unit, found[name]["rms"] / unit) for name in CACHES)])
    return table(["elements", *CACHES], rows)


def _arithmetic(records: list[dict[str, Any]]) -> str:
    rows = []
    for dtype, group in groupby(records, key=lambda one: one["dtype"]):
        rows.append([dtype, *(_pair(one["max"], one["rms"]) for one in group)])
    return table(["q", "cache in the dtype of q", "int8", "float8"], rows)


def _pair(largest: float, rms: float) -> str:
    return f"{largest:.1e} ({rms:.1e})"


def _times(records: list[dict[str, Any]]) -> str:
    rows = []
    for one in records:
        taken = one["seconds"]
        rows.append([
            one["call"], seconds(taken["bfloat16"]),
            seconds(taken["int8"]), ratio(taken["bfloat16"] / taken["int8"]),
            seconds(taken["float8"]), ratio(taken["bfloat16"] / taken["float8"]),
        ])  # fmt: skip
    return table(["call", "bfloat16", "int8", "vs bfloat16", "float8", "vs bfloat16"], rows)
