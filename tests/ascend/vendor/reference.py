"""Attention of one sequence, as the vendor documents the two operators: in float64, with masks that are True = hidden.

It follows the documentation of torch_npu and CANN, and uses none of our code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

COMPRESSED = 2048  # rows and columns of the mask of modes 2, 3 and 4


class Rows(NamedTuple):
    """The results of one sequence in float64."""

    out: Tensor  # (queries, heads, headdim_v)
    maximum: Tensor  # (heads, queries), of the scaled scores and the sink
    total: Tensor  # (heads, queries), of exp(score - maximum), including the sink
    empty: Tensor  # bool (queries,): no key is visible


def require(condition: bool, message: str) -> None:
    """Raises the error of an operator for wrong arguments."""
    if not condition:
        raise RuntimeError(f"the operator does not take this: {message}")


def hidden_keys(queries: int, keys: int, mode: int, mask: Tensor | None, pre_tokens: int, next_tokens: int) -> Tensor:
    """bool (queries, keys), True where a key takes no part.

    mask: that of the call, for modes 0 and 1 already cut to (queries, keys)
    """
    if mask is None:
        require(mode in (0, 2, 3, 4), f"sparse_mode {mode}")
        return torch.zeros(queries, keys, dtype=torch.bool)  # "fixed to full computation", whatever the mode
    if mode in (0, 1):
        return mask
    require(mode in (2, 3, 4), f"sparse_mode {mode}")
    check_compressed(mask)
    query, key = torch.arange(queries)[:, None], torch.arange(keys)[None, :]
    if mode == 2:  # the triangle begins at the top left corner
        return key > query
    from_corner = (queries - 1 - query) - (keys - 1 - key)  # 0 on the diagonal through the bottom right corner
    if mode == 3:
        return from_corner > 0
    # pre_tokens is the reach to the left of that diagonal, next_tokens the reach to its right.
    require(pre_tokens + next_tokens >= 0, "pre_tokens and next_tokens must intersect")
    return (from_corner < -pre_tokens) | (from_corner > next_tokens)


def check_compressed(mask: Tensor) -> None:
    """Modes 2 to 4 take the lower triangle of 2048 x 2048 with 0 for visible, the diagonal included."""
    require(mask.dtype in (torch.bool, torch.uint8, torch.int8), f"a mask of {mask.dtype}")
    require(tuple(mask.shape) == (COMPRESSED, COMPRESSED), f"a mask of shape {tuple(mask.shape)}")
    strictly_above = torch.ones(COMPRESSED, COMPRESSED, dtype=torch.bool).triu(diagonal=1)
    require(torch.equal(mask.bool(), strictly_above), "a mask other than the lower triangle")


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, hidden: Tensor, sink: Tensor | None = None) -> Rows:
    """q (queries, heads, headdim), k and v (keys, heads of keys, headdim), sink (heads,)."""
    group = q.shape[1] // k.shape[1]
    keys, values = (each.double().repeat_interleave(group, dim=1) for each in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * scale
    scores = scores.masked_fill(hidden, -torch.inf)
    if sink is not None:
        extra = sink.double()[:, None, None].expand(-1, q.shape[0], 1)
        scores = torch.cat((scores, extra), dim=-1)
        values = torch.cat((values, values.new_zeros(1, *values.shape[1:])))
    empty = hidden.all(dim=-1)
    maximum = scores.amax(dim=-1) if scores.shape[-1] else scores.new_full(scores.shape[:2], -torch.inf)
    weights = torch.exp(scores - maximum.masked_fill(maximum.isneginf(), 0.0).unsqueeze(-1))
    total = weights.sum(dim=-1)
    out = torch.einsum("hqk,khd->qhd", weights, values) / total.T.unsqueeze(-1)
    return Rows(out, maximum, total, empty)


def check_common(query: Tensor, key: Tensor, value: Tensor, heads: int, heads_k: int, given_heads: int) -> None:
    """Checks that both operators make. heads, heads_k: heads of query and key; given_heads: the argument."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        require(tensor.is_contiguous(), f"{name} is not contiguous")
        require(tensor.numel() > 0, f"{name} of shape {tuple(tensor.shape)} is empty")
    require(given_heads == heads, f"{given_heads} heads given, query has {heads}")
    require(1 <= heads <= 256, f"{heads} heads")
    require(heads % heads_k == 0, f"{heads} heads over {heads_k}")


def require_none(**arguments: object) -> None:
    """Checks that arguments that our dispatch does not use are None."""
    for name, value in arguments.items():
        require(value is None, f"{name} is not part of these tests")


def spans(ends: Sequence[int], tokens: int) -> list[slice]:
    """Sequences from cumulative lengths, the first of which is the end of the first sequence."""
    starts = [0, *ends[:-1]]
    require(all(start <= end for start, end in zip(starts, ends, strict=True)), f"lengths {ends} must not decrease")
    require(len(ends) > 0 and ends[-1] == tokens, f"lengths {ends} must end at {tokens} tokens")
    return [slice(start, end) for start, end in zip(starts, ends, strict=True)]
