"""Selected keys of latents on npu_sparse_flash_attention. Not run on an NPU.

Selected keys reach backends as pages of one token: each query is a sequence, and the block table has its keys. So all
slots are one sequence of keys, all queries are one sequence too, and the block table is `sparse_indices`:

    sparse_indices   the block table, and -1 after the keys of a query
    layouts          TND for both, with the ends [total_q] and [slots]
    sparse_mode      0: which keys a query may see has been decided
    query, key       the first 512 elements; query_rope, key_rope: the other 64
    value            key, whose memory the operator reads [F]
    lse              softmax_max + log(softmax_sum), each (1, total_q, nheads), of scaled scores [K]

The operator takes contiguous tensors [F], and a latent is one row of both parts. So latents are copied: all slots, or
only the selected ones where these are fewer. The operator reads no more indices than there are keys [K], so keys that
no index names are added where there are more columns than slots. No length is read on the host.

[F] says nothing of a query without keys: its results are written here.

Sources:
    [F]  torch_npu's documentation of npu_sparse_flash_attention, releases 7.3.0, 26.0.0 and 26.1.0
    [K]  the kernel and its tests in CANN's public operators (attention/sparse_flash_attention of ops-transformer)
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastattention.attention.problem import AttentionOutput, Inputs, Problem
from fastattention.backends.ascend.vendor.masks import SparseMode
from fastattention.backends.ascend.vendor.operators import SELECTED, SELECTED_LATENTS, OperatorCall, run
from fastattention.backends.common.results import keyless
from fastattention.errors import UnsupportedError


def forward(problem: Problem, inputs: Inputs) -> AttentionOutput:
    """One call of the operator. Raises UnsupportedError if values are not the first elements of the latents."""
    assert inputs.block_table is not None
    if 0 in (problem.total_q, inputs.k.shape[0], inputs.block_table.shape[1]):
        return keyless(problem, inputs)
    if not _values_in_keys(inputs):
        raise UnsupportedError(
            f"v has memory of its own; {SELECTED} takes values that are k[..., :{SELECTED_LATENTS}]; use backend='sdpa'"
        )
    indices = _indices(problem, inputs)
    out, row_max, row_sum = run(selected_call(problem, inputs, indices))
    empty = indices[:, :1, None] < 0  # (total_q, 1, 1): keys come first
    out = out.masked_fill(empty, 0.0).unsqueeze(1)
    if not problem.return_lse:
        return AttentionOutput(out, None)
    lse = (row_max + row_sum.log()).transpose(0, 1).masked_fill(empty, -torch.inf)  # (total_q, 1, nheads)
    return AttentionOutput(out, lse.transpose(1, 2).contiguous())


def _values_in_keys(inputs: Inputs) -> bool:
    """Whether v is the first elements of k. All axes but the first and the last have one element."""
    k, v = inputs.k, inputs.v
    return k.data_ptr() == v.data_ptr() and (k.shape[0] == 1 or k.stride(0) == v.stride(0))


def _indices(problem: Problem, inputs: Inputs) -> Tensor:
    """int32 (total_q, columns): the slots of each query, then -1."""
    table, counts = inputs.block_table, inputs.cache_seqlens
    assert table is not None
    assert counts is not None
    counts = counts + problem.seqlen_new
    columns = torch.arange(table.shape[1], dtype=torch.int64, device=table.device).expand_as(table)
    if inputs.cache_leftpad is not None:
        counts = counts - inputs.cache_leftpad
        first = inputs.cache_leftpad.long().unsqueeze(1)
        table = table.gather(1, (columns + first).clamp(max=table.shape[1] - 1))
    return table.masked_fill(columns >= counts.unsqueeze(1), -1)


def selected_call(problem: Problem, inputs: Inputs, indices: Tensor) -> OperatorCall:
    """The call for `indices`, int32 (total_q, columns) slots."""
    latents = inputs.k.squeeze(1)  # (slots, 1, headdim)
    missing = indices.shape[1] - latents.shape[0]
    if missing > 0:
        latents = torch.nn.functional.pad(latents, (0, 0, 0, 0, 0, missing))
    elif latents.shape[0] > indices.numel():
        latents = latents.index_select(0, indices.clamp(min=0).flatten())
        places = torch.arange(indices.numel(), dtype=torch.int32, device=indices.device).view_as(indices)
        indices = places.masked_fill(indices < 0, -1)
    q = inputs.q.squeeze(1)
    key, key_rope = (part.contiguous() for part in latents.tensor_split((SELECTED_LATENTS,), dim=-1))
    query, query_rope = (part.contiguous() for part in q.tensor_split((SELECTED_LATENTS,), dim=-1))
    return OperatorCall(
        SELECTED,
        {
            "query": query,
            "key": key,
            "value": key,
            "sparse_indices": indices.unsqueeze(1).contiguous(),
            "scale_value": problem.softmax_scale,
            "actual_seq_lengths_query": indices.new_full((1,), query.shape[0]),
            "actual_seq_lengths_kv": indices.new_full((1,), key.shape[0]),
            "query_rope": query_rope,
            "key_rope": key_rope,
            "sparse_block_size": 1,
            "layout_query": "TND",
            "layout_kv": "TND",
            "sparse_mode": int(SparseMode.NO_MASK),
            "attention_mode": 2,  # latents: the only one that there is
            "return_softmax_lse": problem.return_lse,
        },
    )
