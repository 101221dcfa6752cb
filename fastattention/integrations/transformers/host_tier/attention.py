"""Attention of one layer to pages in host memory: on the CPU for few queries, and else on the device of the queries."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattention.attention.interface import fast_attn_varlen_func, fast_attn_with_kvcache

# Queries of a sequence up to which the CPU attends to it. A CPU that computes 1 TFLOPS needs as long for 5 queries as a
# link of 50 GB/s takes to upload the keys, with groups of 4 heads of 128. With more queries the GPU is faster.
MOST_ON_CPU = 4


def attend_to_host_pages(q: Tensor, k: Tensor, v: Tensor, kwargs: dict[str, Any], options: dict[str, Any]) -> Tensor:
    """Out (total_q, nheads, headdim), on the device of q.

    q, k, v: (total_q, heads, headdim), the new tokens of all sequences
    kwargs: the entries of `FullPages.prepare`, in host memory, where tokens are stored unless attention appends them
    options: those of every call of attention, with the block table
    """
    pages = kwargs["k_cache"], kwargs["v_cache"]
    if kwargs["cache_seqlens"] is not None:
        one_token = [x[:, None].cpu() for x in (q, k, v)]
        steps: Any = fast_attn_with_kvcache(
            one_token[0], *pages, *one_token[1:], cache_seqlens=kwargs["cache_seqlens"], **_in_host_memory(options)
        )
        of_steps: Tensor = steps[:, 0].to(q.device)
        return of_steps
    starts, lengths = kwargs["host_offsets_q"].tolist(), kwargs["host_lengths_k"].tolist()
    out = torch.empty_like(q)
    few = [row for row, length in enumerate(lengths) if 0 < starts[row + 1] - starts[row] <= MOST_ON_CPU]
    if few:
        _attend_on_cpu(q, out, few, kwargs, options)
    for row, length in enumerate(lengths):
        new = slice(starts[row], starts[row + 1])
        count = new.stop - new.start
        if count <= MOST_ON_CPU:
            continue
        seen = (k[new], v[new]) if length == count else _uploaded(row, length, q.device, kwargs, options)
        offsets = (torch.tensor([0, one], dtype=torch.int32, device=q.device) for one in (count, length))
        found: Any = fast_attn_varlen_func(q[new], *seen, *offsets, count, length, **options | {"block_table": None})
        out[new] = found
    return out


def _in_host_memory(options: dict[str, Any]) -> dict[str, Any]:
    return {name: x.cpu() if isinstance(x, Tensor) else x for name, x in options.items()}


def _attend_on_cpu(q: Tensor, out: Tensor, rows: list[int], kwargs: dict[str, Any], options: dict[str, Any]) -> None:
    """Writes the results of some sequences."""
    starts, keys = kwargs["host_offsets_q"], kwargs["host_lengths_k"]
    tokens = torch.cat([torch.arange(int(starts[row]), int(starts[row + 1]), device="cpu") for row in rows]).to(
        q.device
    )
    counts, lengths = starts.diff()[rows], keys[rows]
    offsets = (torch.nn.functional.pad(x.cumsum(0, dtype=torch.int32), (1, 0)) for x in (counts, lengths))
    options = _in_host_memory(options)
    options["block_table"] = options["block_table"][rows]
    found: Any = fast_attn_varlen_func(
        q[tokens].cpu(),
        kwargs["k_cache"],
        kwargs["v_cache"],
        *offsets,
        int(counts.max()),
        int(lengths.max()),
        **options,
    )
    out[tokens] = found.to(q.device)


def _uploaded(
    row: int, length: int, device: torch.device, kwargs: dict[str, Any], options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Keys and values of a sequence on the device."""
    size = kwargs["k_cache"].shape[1]
    pages = options["block_table"][row, : -(-length // size)].long()
    k, v = (kwargs[name].index_select(0, pages).flatten(0, 1)[:length].to(device) for name in ("k_cache", "v_cache"))
    return k, v
