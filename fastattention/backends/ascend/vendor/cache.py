"""Calls with a KV cache on npu_fused_infer_attention_score; a dense call is one whose cache is full.

The operator takes contiguous tensors: caches stored tokens first (BSND) or heads first (BNSD), and pages as
(num_blocks, page_block_size, nheads_k * headdim) under the first layout or (num_blocks, nheads_k, page_block_size,
headdim) under the second. Caches stored in one of these ways are not copied. Otherwise the keys in use are copied, and
also with cache_batch_idx or cache_leftpad, which the operator does not take. Lengths are lists on the host, one entry a
sequence, not cumulative.

With one query a sequence the operator ignores sparse_mode and its tokens, so the left side of a window is passed as a
mask then. Rows without keys are defined only by a correction that inner_precise 2 turns on, and their lse is +inf, so
both are overwritten here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastattention.attention.problem import AttentionOutput, Inputs, Problem
from fastattention.backends.ascend.vendor.masks import rows_without_keys, sparse_mask
from fastattention.backends.ascend.vendor.operators import INFERENCE, OperatorCall, check_size, mask_arguments, run
from fastattention.backends.common.results import keyless
from fastattention.host_numbers import read_numbers

_TOKENS = ("pre_tokens", "next_tokens")
MAX_PAGED_ELEMENTS = 2**31 - 1  # elements of all pages: a decode counts them in int32 (torch_npu's documentation)
HIGH_PRECISION = 0  # inner_precise; the other values trade float16 accuracy for speed
CORRECT_ROWS = 2  # high precision, and rows whose keys are all masked are corrected
# key_antiquant_mode: whose the scales of an int8 cache are. The operator takes them heads first, (rows or pages,
# nheads_k, tokens), and for more than one query (rows, tokens).
_TOKEN, _TOKEN_HEAD, _TOKEN_HEAD_IN_PAGES = 1, 3, 5


def cache_lengths(problem: Problem, inputs: Inputs) -> list[int]:
    """Keys of each sequence, including those that this call appends, without padding on the left."""
    assert inputs.cache_seqlens is not None
    seqlens = read_numbers(inputs.cache_seqlens)
    leftpad = [0] * len(seqlens) if inputs.cache_leftpad is None else read_numbers(inputs.cache_leftpad)
    return [length + problem.seqlen_new - pad for length, pad in zip(seqlens, leftpad, strict=True)]


def forward(problem: Problem, inputs: Inputs, lengths: list[int]) -> AttentionOutput:
    """One call of the operator. lengths: keys of each sequence."""
    if problem.total_q == 0 or max(lengths, default=0) == 0:
        return keyless(problem, inputs)
    if inputs.cache_batch_idx is not None or inputs.cache_leftpad is not None:
        inputs = gather_keys(inputs, lengths)
    placed = place(inputs, max(lengths))
    out, lse = run(cache_call(problem, placed, lengths))
    return finish(problem, placed.layout, lengths, out, lse if problem.return_lse else None)


class Placed(NamedTuple):
    """The tensors of a call, contiguous, in one of the operator's layouts."""

    layout: str  # BSND or BNSD
    q: Tensor
    k: Tensor
    v: Tensor
    block_table: Tensor | None
    block_size: int  # 0 without pages
    capacity: int  # keys of a sequence that k has room for
    scales: tuple[Tensor, Tensor] | None  # scales of an int8 k and v, float32 (rows or pages, tokens, heads)


def gather_keys(inputs: Inputs, lengths: list[int]) -> Inputs:
    """The same call on a copy of the keys in use, (batch_size, longest, heads, headdim), that begins with key 0.

    After a sequence's last key the copy repeats it. The operator does not read these keys, and no other memory is read.
    """
    longest, device = max(lengths), inputs.k.device
    last = torch.tensor(lengths, dtype=torch.int64, device=device).sub(1).clamp(min=0).unsqueeze(1)
    position = torch.minimum(torch.arange(longest, device=device), last)  # (batch_size, longest)
    if inputs.cache_leftpad is not None:
        position = position + inputs.cache_leftpad.long().unsqueeze(1)
    if inputs.block_table is not None:
        size = inputs.k.shape[1]
        # A sequence without keys may have no page at all; then any page will do.
        page = (position // size).clamp(max=inputs.block_table.shape[1] - 1)
        row = inputs.block_table.long().gather(1, page).clamp(0, inputs.k.shape[0] - 1)
        position = position % size
    elif inputs.cache_batch_idx is not None:
        row = inputs.cache_batch_idx.long().unsqueeze(1)
    else:
        row = torch.arange(len(lengths), device=device).unsqueeze(1)
    position = position.clamp(max=inputs.k.shape[1] - 1)  # a sequence without keys may end where its row does
    caches = {name: getattr(inputs, name) for name in ("k", "v", "k_scale", "v_scale")}
    gathered: dict[str, Any] = {name: cache[row, position] for name, cache in caches.items() if cache is not None}
    return inputs._replace(**gathered, block_table=None)


def lies_heads_first(inputs: Inputs) -> bool:
    """Whether k and v are contiguous as (rows or pages, heads, tokens, headdim), but not in their own order of axes."""
    return all(each.transpose(1, 2).is_contiguous() and not each.is_contiguous() for each in (inputs.k, inputs.v))


def place(inputs: Inputs, longest: int) -> Placed:
    """`inputs` as the operator reads them. longest: keys of the longest sequence."""
    q, k, v, table = inputs.q, inputs.k, inputs.v, inputs.block_table
    scales = None if inputs.k_scale is None or inputs.v_scale is None else (inputs.k_scale, inputs.v_scale)
    heads_first = lies_heads_first(inputs)
    layout = "BNSD" if heads_first else "BSND"
    if heads_first:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if table is None:
        if not (k.is_contiguous() and v.is_contiguous()):
            k, v = k[:, :longest], v[:, :longest]  # only these keys are copied below
        capacity = k.shape[layout.index("S")]
        if scales is not None:
            scales = scales[0][:, :capacity], scales[1][:, :capacity]
        return Placed(layout, q.contiguous(), k.contiguous(), v.contiguous(), None, 0, capacity, scales)
    size = k.shape[layout.index("S")]
    check_size("elements of k_cache", k.numel(), MAX_PAGED_ELEMENTS)
    if not heads_first:
        k, v = k.contiguous().flatten(2), v.contiguous().flatten(2)
    return Placed(layout, q.contiguous(), k, v, table.contiguous(), size, table.shape[1] * size, scales)


def cache_call(problem: Problem, placed: Placed, lengths: list[int]) -> OperatorCall:
    """The call for sequences of the given numbers of keys."""
    hidden = any(rows_without_keys(problem.seqlen_q, length, problem.window_right) for length in lengths)
    arguments: dict[str, Any] = {
        "query": placed.q,
        "key": placed.k,
        "value": placed.v,
        "actual_seq_lengths_kv": lengths,
        "num_heads": problem.nheads,
        "num_key_value_heads": problem.nheads_k,
        "scale": problem.softmax_scale,
        "input_layout": placed.layout,
        # For one query the operator takes 0 or 1 only.
        "inner_precise": CORRECT_ROWS if hidden and problem.seqlen_q > 1 else HIGH_PRECISION,
        "softmax_lse_flag": problem.return_lse,
    }
    if placed.block_table is not None:
        arguments |= {"block_table": placed.block_table, "block_size": placed.block_size}
    if placed.scales is not None:
        arguments |= _scale_arguments(problem, placed, *placed.scales)
    if problem.seqlen_q > 1:
        mask = sparse_mask(problem.window_left, problem.window_right, problem.seqlen_q, max(lengths))
        return OperatorCall(INFERENCE, arguments | mask_arguments(mask, problem.device, _TOKENS))
    if 0 <= problem.window_left < max(lengths) - 1:
        arguments["atten_mask"] = left_of_window(problem, placed.capacity, lengths)
    return OperatorCall(INFERENCE, arguments)


def _scale_arguments(problem: Problem, placed: Placed, k_scale: Tensor, v_scale: Tensor) -> dict[str, Any]:
    """The arguments that make the operator multiply int8 keys and values by their scales."""
    if problem.seqlen_q == 1:
        mode = _TOKEN_HEAD if placed.block_table is None else _TOKEN_HEAD_IN_PAGES
        k_scale, v_scale = k_scale.transpose(1, 2), v_scale.transpose(1, 2)
    else:  # there is one key head
        mode = _TOKEN
        k_scale, v_scale = k_scale.squeeze(2), v_scale.squeeze(2)
    return {
        "key_antiquant_mode": mode,
        "value_antiquant_mode": mode,
        "key_antiquant_scale": k_scale.contiguous(),
        "value_antiquant_scale": v_scale.contiguous(),
    }


def left_of_window(problem: Problem, capacity: int, lengths: list[int]) -> Tensor:
    """True for keys to the left of the window of a sequence's one query: (batch_size, 1, 1, capacity)."""
    first = torch.tensor(lengths, dtype=torch.int64, device=problem.device) - 1 - problem.window_left
    return (torch.arange(capacity, device=problem.device) < first.unsqueeze(1))[:, None, None, :]


def finish(problem: Problem, layout: str, lengths: list[int], out: Tensor, lse: Tensor | None) -> AttentionOutput:
    """The operator's results in our layout: lse from (batch_size, nheads, seqlen_q, 1), and rows without keys."""
    if layout == "BNSD":
        out = out.transpose(1, 2)
    if lse is not None:
        lse = lse.squeeze(-1)
    hidden = [rows_without_keys(problem.seqlen_q, length, problem.window_right) for length in lengths]
    if any(hidden):
        count = torch.tensor(hidden, dtype=torch.int64, device=problem.device)
        empty = torch.arange(problem.seqlen_q, device=problem.device) < count.unsqueeze(1)  # (batch_size, seqlen_q)
        out = out.masked_fill(empty[:, :, None, None], 0.0)
        lse = None if lse is None else lse.masked_fill(empty[:, None, :], -torch.inf)
    return AttentionOutput(out.contiguous(), None if lse is None else lse.contiguous())
