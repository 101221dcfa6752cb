"""The page of latent attention: the indexer, selected latents, and a token of layers of DeepSeek's size."""

from __future__ import annotations

from typing import Any

from . import results
from .markdown import number, page, ratio, seconds, table, tokens
from .results import Result

FILES = {"latents_gpu": "On a GPU", "latents_cpu": "On a CPU"}
OURS, TRANSFORMERS = "fast_attention", ("sdpa", "eager")
INDEXER_FLOPS, SELECTED_FLOPS = 2 * 64 * 128, 2 * 128 * (576 + 512) * 2048  # of a key, and of a query
INTRODUCTION = """\
DeepSeek's sizes: latents of 512 + 64 elements, 128 heads, and an indexer of 64 heads of 128 that selects 2,048 keys of
each query. Calls take turns in one process; **bold** ratios are losses. The
[guide](../guides/latent-attention.md) says how to call it."""
INDEXER = """\
The indexer scores all keys and returns the best, in memory that does not grow with queries x keys. "Product alone" is
torch's product of queries and keys, a piece at a time, without a choice."""
SELECTED = """\
Attention to 2,048 latents of each query, anywhere in the cache. "One after another" is attention of as many queries to
a cache that holds 2,048 latents, with nothing to select."""
LAYERS = """\
A token of {count} of a model in Transformers with random weights, after a random cache. fast_attention attends to
latents; sdpa and eager expand keys and values of 128 heads from all of them."""


def build() -> str:
    """latents.md."""
    blocks = [block for name, heading in FILES.items() for block in _section(name, heading)]
    return page("Latent attention", INTRODUCTION, *blocks)


def _section(name: str, heading: str) -> list[str]:
    if not (results.RESULTS / f"{name}.json").exists():
        return []
    result = Result.load(name)
    return result.sourced(f"## {heading}", *tables(result.data))


def tables(data: dict[str, Any]) -> list[str]:
    """The text and the tables of a device."""
    many = data["num_layers"] > 1
    about = LAYERS.format(count=f"{data['num_layers']} layers" if many else "a layer")
    columns = ["sequences x queries", "keys", "dtype", "ours"]
    return [
        INDEXER,
        table([*columns, "TFLOPS", "product alone / ours"], map(_of_indexer, data["indexer"]), text_columns=3),
        SELECTED,
        table([*columns, "TFLOPS", "one after another / ours"], map(_of_selected, data["selected"]), text_columns=3),
        about,
        _of_layers(data["layers"]),
    ]


def _cells(one: dict[str, Any], flops: float, other: str) -> list[str]:
    taken = one["seconds"]
    return [
        f"{one['sequences']} x {one['queries']}", tokens(one["keys"]), one["dtype"], seconds(taken["fastattention"]),
        number(1e-12 * flops / taken["fastattention"]), ratio(taken[other] / taken["fastattention"]),
    ]  # fmt: skip


def _of_indexer(one: dict[str, Any]) -> list[str]:
    return _cells(one, INDEXER_FLOPS * one["sequences"] * one["queries"] * one["keys"], "product")


def _of_selected(one: dict[str, Any]) -> list[str]:
    return _cells(one, SELECTED_FLOPS * one["sequences"] * one["queries"], "one after another")


def _of_layers(rows: list[dict[str, Any]]) -> str:
    found = {(row["model"], row["keys"], row["implementation"]): row for row in rows}
    memory = any("bytes" in row for row in rows)
    lines = []
    for model, keys in dict.fromkeys((row["model"], row["keys"]) for row in rows):
        ours = found[model, keys, OURS]
        others = [found.get((model, keys, name)) for name in TRANSFORMERS]
        cells = [model, tokens(keys), seconds(ours["seconds"])]
        cells += ["-" if other is None else ratio(other["seconds"] / ours["seconds"]) for other in others]
        if memory:
            cells += ["-" if x is None else f"{x['bytes'] / 1e9:.2f} GB" for x in (ours, *others)]
        lines.append(cells)
    headings = ["model", "keys", "fast_attention", *(f"{name} / ours" for name in TRANSFORMERS)]
    headings += ["memory beside cache", *(f"that of {name}" for name in TRANSFORMERS)] if memory else []
    return table(headings, lines)
