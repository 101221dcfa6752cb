"""The indexer on npu_lightning_indexer. Not run on an NPU.

    score[t, s] = sum_j weights[t, j] max(q[t, j] . k[s], 0), and the sparse_count greatest of each query [L]

The mask is sparse_mode: 0 lets a query see every key, 3 is causal, aligned to the bottom right. Queries of one length
are BSND, others TND. Keys in pages are PA_BSND, with either. Other keys must have the layout of the queries [L]: they
are BSND where both are rows of a batch, and TND otherwise. Lengths are tensors, so nothing waits for the device.

In TND lengths are cumulative ends, so a sequence begins where the one before it ends. Tokens behind `seqused_k` are
therefore a sequence of their own, which has no queries: [L] lets the ends of queries repeat.

[L] says nothing of the order of a query's keys, nor of what follows where it sees fewer than sparse_count. Here keys
are put in rising order, and whatever is no key that the query sees becomes -1. [L] does not say either which of keys
with one score are taken, or what becomes of a score that is not a number. Both are the operator's choice.

Sources:
    [L]  torch_npu's documentation of npu_lightning_indexer, releases 26.0.0 and 26.1.0, which go with CANN 9
    [8]  the same, release 7.3.0, which goes with CANN 8.5
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattention.backends.ascend.vendor.masks import SparseMode
from fastattention.backends.ascend.vendor.operators import INDEXER, OperatorCall, run
from fastattention.engine.offsets import key_counts
from fastattention.indexer.problem import IndexerInputs, IndexerOutput, IndexerProblem

_HEADDIM = 128  # [L]
_MAX_HEADS = 64  # [L]: on A2 and A3
_PAGE_STEP, _MAX_PAGE = 16, 1024  # [L]: tokens of a page
_MAX_COUNT, _COUNT_STEP, _MAX_LARGE_COUNT = 2048, 1024, 8192  # [L]: 1 to 2048, then multiples of 1024; [8]: to 2048
_NEWER_CANN = 9  # [L], [8]: for counts beyond 2048, and for weights in float32 beside 16-bit q and k
_NO_KEY = torch.iinfo(torch.int32).max  # stands for -1 while keys are sorted

_INSTEAD = "or backend='torch'"


def why_not_index(problem: IndexerProblem, cann: int) -> str | None:
    """Why npu_lightning_indexer cannot serve a problem, or None. cann: major version. The chip is not checked."""
    if not hasattr(torch.ops.npu, INDEXER):
        return f"no {INDEXER} is registered; import torch_npu, or install a version that has it"
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return f"dtype {problem.dtype}; {INDEXER} takes float16 and bfloat16, {_INSTEAD}"
    if problem.headdim != _HEADDIM:
        return f"headdim={problem.headdim}; {INDEXER} takes {_HEADDIM}, {_INSTEAD}"
    if not 1 <= problem.nheads <= _MAX_HEADS:
        return f"nheads={problem.nheads}; {INDEXER} takes 1 to {_MAX_HEADS}, {_INSTEAD}"
    size = problem.k_seqlen
    if problem.paged and (size % _PAGE_STEP or not 0 < size <= _MAX_PAGE):
        return f"page_block_size={size}; {INDEXER} takes multiples of {_PAGE_STEP} up to {_MAX_PAGE}, {_INSTEAD}"
    if problem.weights_dtype is not problem.dtype and cann < _NEWER_CANN:
        return (
            f"weights in {problem.weights_dtype}, q in {problem.dtype}; {INDEXER} of CANN before {_NEWER_CANN} takes "
            f"weights in the dtype of q; convert them, use a newer CANN, {_INSTEAD}"
        )
    return _why_not_count(problem.topk, cann)


def _why_not_count(topk: int, cann: int) -> str | None:
    if topk <= _MAX_COUNT:
        return None
    if topk % _COUNT_STEP or topk > _MAX_LARGE_COUNT:
        return (
            f"topk={topk}; {INDEXER} takes 1 to {_MAX_COUNT}, then multiples of {_COUNT_STEP} up to "
            f"{_MAX_LARGE_COUNT}, {_INSTEAD}"
        )
    if cann < _NEWER_CANN:
        return f"topk={topk}; {INDEXER} of CANN before {_NEWER_CANN} takes 1 to {_MAX_COUNT}, {_INSTEAD}"
    return None


@torch.no_grad()
def index(problem: IndexerProblem, inputs: IndexerInputs) -> IndexerOutput:
    """The keys of every query, of a problem that `why_not_index` accepted, on the device of its tensors."""
    if problem.total_q == 0 or problem.most_keys == 0 or inputs.k.shape[0] == 0:  # the operator takes no empty tensors
        return IndexerOutput(inputs.q.new_full(problem.out_shape, -1, dtype=torch.int32))
    indices, _ = run(index_call(problem, inputs))
    return IndexerOutput(_in_rising_order(indices.view(problem.out_shape), _keys_seen(problem, inputs)))


def index_call(problem: IndexerProblem, inputs: IndexerInputs) -> OperatorCall:
    """The call for tensors none of which is empty."""
    # Weights of the dtype of q were made float32 for all backends: here they are what was given.
    weights_dtype = problem.dtype if problem.weights_dtype is problem.dtype else torch.float32
    q, weights = inputs.q.contiguous(), inputs.weights.to(weights_dtype).contiguous()
    keys = inputs.k.contiguous().unsqueeze(2)  # of one head
    arguments: dict[str, Any] = {
        "sparse_count": problem.topk,
        "sparse_mode": int(SparseMode.CAUSAL if problem.causal else SparseMode.NO_MASK),
    }
    is_batch_q = inputs.cu_seqlens_q is None
    if problem.paged or (is_batch_q and inputs.cu_seqlens_k is None):
        lengths_q = inputs.q.new_full((problem.batch_size,), problem.seqlen_q, dtype=torch.int32)
        arguments |= {
            "actual_seq_lengths_query": lengths_q if is_batch_q else _ends_q(problem, inputs),
            "actual_seq_lengths_key": _lengths_k(problem, inputs),
            "layout_query": "BSND" if is_batch_q else "TND",
            "layout_key": "PA_BSND" if problem.paged else "BSND",
        }
        if inputs.block_table is not None:
            arguments["block_table"] = inputs.block_table.contiguous()
        if is_batch_q:
            batch = (problem.batch_size, problem.seqlen_q)
            q, weights = q.view(*batch, *q.shape[1:]), weights.view(*batch, -1)
    else:
        keys = keys.flatten(0, 1)
        arguments |= _varlen_arguments(problem, inputs)
    return OperatorCall(INDEXER, {"query": q, "key": keys, "weights": weights} | arguments)


def _varlen_arguments(problem: IndexerProblem, inputs: IndexerInputs) -> dict[str, Any]:
    """Layouts and lengths of queries and keys that lie one sequence after another."""
    ends_q, ends_k = _ends_q(problem, inputs), _ends_k(problem, inputs)
    if inputs.seqused_k is not None:
        starts = torch.nn.functional.pad(ends_k[:-1], (1, 0))
        ends_k = torch.stack((starts + inputs.seqused_k, ends_k), dim=1).flatten()
        ends_q = torch.stack((ends_q, ends_q), dim=1).flatten()
    return {
        "actual_seq_lengths_query": ends_q,
        "actual_seq_lengths_key": ends_k,
        "layout_query": "TND",
        "layout_key": "TND",
    }


def _ends_q(problem: IndexerProblem, inputs: IndexerInputs) -> Tensor:
    """Where the queries of each sequence end, int32 (batch_size,)."""
    if inputs.cu_seqlens_q is not None:
        return inputs.cu_seqlens_q[1:].contiguous()
    return _multiples(problem.seqlen_q, problem.batch_size, inputs.q.device)


def _ends_k(problem: IndexerProblem, inputs: IndexerInputs) -> Tensor:
    """Where the keys of each sequence end, those included that are not used, int32 (batch_size,)."""
    if inputs.cu_seqlens_k is not None:
        return inputs.cu_seqlens_k[1:].contiguous()
    return _multiples(problem.k_seqlen, problem.batch_size, inputs.q.device)


def _multiples(step: int, count: int, device: torch.device) -> Tensor:
    return torch.arange(1, count + 1, dtype=torch.int32, device=device) * step


def _lengths_k(problem: IndexerProblem, inputs: IndexerInputs) -> Tensor:
    """Keys of each sequence that there are, int32 (batch_size,)."""
    return key_counts(inputs.seqused_k, inputs.cu_seqlens_k, problem.batch_size, problem.k_seqlen, inputs.q.device)


def _keys_seen(problem: IndexerProblem, inputs: IndexerInputs) -> Tensor:
    """How many keys each query sees, int32 (total_q,). They are the first ones of its sequence."""
    ends_q, lengths_k = _ends_q(problem, inputs), _lengths_k(problem, inputs)
    rows = torch.arange(problem.total_q, dtype=torch.int32, device=inputs.q.device)
    sequences = torch.searchsorted(ends_q, rows, right=True)
    return lengths_k[sequences] - (ends_q[sequences] - 1 - rows) * problem.causal


def _in_rising_order(indices: Tensor, seen: Tensor) -> Tensor:
    """The keys of each query in rising order, then -1. seen: how many keys each query sees."""
    is_key = (indices >= 0) & (indices < seen[:, None])
    ordered = indices.masked_fill(~is_key, _NO_KEY).sort(dim=1).values
    return ordered.masked_fill(ordered == _NO_KEY, -1)
