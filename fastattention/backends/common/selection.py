"""What backends of the selection share: the limits of queries, the error of a wrong index, parameters of kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastattention.attention.selection.problem import SelectionInputs, SelectionOutput, SelectionProblem
from fastattention.engine.offsets import key_counts
from fastattention.errors import ArgumentError


class Limits(NamedTuple):
    """The sequence of each query and its keys, all (total_q,)."""

    sequences: Tensor  # int64
    lengths: Tensor  # int32, keys of the sequence
    seen: Tensor  # int32, how many of them the query sees, which may be below 0


def limits_of(problem: SelectionProblem, inputs: SelectionInputs) -> Limits:
    """The limits of all queries. Those after the last sequence, as in CUDA graphs of batches that vary, see no key."""
    device = inputs.indices.device
    rows = torch.arange(problem.total_q, dtype=torch.int32, device=device)
    lengths = key_counts(inputs.seqused_k, inputs.cu_seqlens_k, problem.batch_size, problem.k_seqlen, device)
    if inputs.cu_seqlens_q is None:
        sequences = (rows // max(problem.seqlen_q, 1)).long()
        ends = (sequences.int() + 1) * problem.seqlen_q
    else:
        sequences = torch.searchsorted(inputs.cu_seqlens_q[1:], rows, right=True).clamp_(max=problem.batch_size - 1)
        ends = inputs.cu_seqlens_q[1:][sequences]
    lengths = lengths[sequences]
    later = ends - 1 - rows
    seen = lengths - later if problem.causal else lengths
    return Limits(sequences, lengths, torch.where(later < 0, 0, seen))


def wrong_index(problem: SelectionProblem, inputs: SelectionInputs, place: int) -> ArgumentError:
    """The error of the index at `place` of (total_q, heads, topk), which is no block of the query's sequence."""
    query = place // (problem.heads * problem.topk)
    index, count = int(inputs.indices.flatten()[place]), int(limits_of(problem, inputs).lengths[query])
    what = "key" if problem.key_block == 1 else f"block of {problem.key_block} keys"
    return ArgumentError(f"indices name {what} {index} for query {query}, whose sequence has {count} keys; -1 is none")


def no_slots(problem: SelectionProblem, inputs: SelectionInputs) -> SelectionOutput:
    """The result without a query, or without a sequence that has keys."""
    zeros = inputs.indices.new_zeros((problem.num_sets, problem.width), dtype=torch.int32)
    return SelectionOutput(zeros, inputs.indices.new_zeros(problem.num_sets, dtype=torch.int32))


def check_indices(problem: SelectionProblem, inputs: SelectionInputs, limits: Limits) -> None:
    """Raises ArgumentError for an index that is no block of its sequence, where values may be read."""
    ends = (limits.lengths + (problem.key_block - 1)) // problem.key_block
    wrong = (inputs.indices < -1) | (inputs.indices >= ends[:, None, None])
    if bool(wrong.any()):
        raise wrong_index(problem, inputs, int(wrong.flatten().nonzero()[0]))


def shared_params(problem: SelectionProblem, inputs: SelectionInputs) -> dict[str, int]:
    """What native kernels are told alike on CPUs and GPUs, by the names in both of their structs."""
    names = ("heads", "topk", "batch_size", "seqlen_q", "k_seqlen", "key_block", "causal")
    steps = ("row_step", "token_step", "head_step")
    table = 0 if inputs.block_table is None else inputs.block_table.shape[1]
    return {name: getattr(problem, name) for name in (*names, *steps)} | {"block_table_stride": table}
