"""Dense and variable-length sequences on npu_fusion_attention.

Layouts are BSND and TND, which are ours. The operator returns the maximum and the sum of every row's softmax eight
times over, as (batch, heads, queries, 8) or (tokens, heads, 8), and lse = maximum + log(sum). Lengths of varlen
sequences are lists of cumulative ends, without the 0 that cu_seqlens begins with.

Rows without keys are not given to the operator. It repairs them in some modes, but varlen sequences in mode 3 must
have no more queries than keys (FlashAttentionVarLenScore, version 5), and no value for their softmax is documented.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastattention.attention.problem import AttentionOutput, Inputs, Problem
from fastattention.backends.ascend.vendor.limits import MAX_TOKENS
from fastattention.backends.ascend.vendor.masks import rows_without_keys, sparse_mask
from fastattention.backends.ascend.vendor.operators import TRAINING, OperatorCall, check_size, mask_arguments, run
from fastattention.backends.common.results import keyless
from fastattention.host_numbers import read_numbers

_TOKENS = ("pre_tockens", "next_tockens")  # as npu_fusion_attention spells them


def forward_dense(problem: Problem, inputs: Inputs) -> AttentionOutput:
    """One call of the operator, for sequences of which every query has keys."""
    out, row_max, row_sum, *_ = run(dense_call(problem, inputs))
    return AttentionOutput(out, row_max[..., 0] + row_sum[..., 0].log() if problem.return_lse else None)


def dense_call(problem: Problem, inputs: Inputs) -> OperatorCall:
    """The call for sequences of which every query has keys."""
    mask = sparse_mask(problem.window_left, problem.window_right, problem.seqlen_q, problem.seqlen_k)
    arguments = _arguments(problem, inputs) | mask_arguments(mask, problem.device, _TOKENS)
    return OperatorCall(TRAINING, arguments | {"input_layout": "BSND"})


def last_queries(problem: Problem, seqlen_q: int) -> Problem:
    """The dense problem of the last `seqlen_q` queries of every sequence."""
    return dataclasses.replace(problem, seqlen_q=seqlen_q, total_q=problem.batch_size * seqlen_q)


class VarlenSequences(NamedTuple):
    """Variable-length sequences as the operator takes them: each with a query and a key, and every query with a key."""

    ends_q: list[int]  # cumulative, without the leading 0
    ends_k: list[int]
    spans_q: list[tuple[int, int]]  # tokens of q, first and past the last, that are given to the operator
    spans_k: list[tuple[int, int]]

    @classmethod
    def of_call(cls, problem: Problem, inputs: Inputs) -> VarlenSequences:
        """The sequences of a call. Waits for the device, whose lengths it reads."""
        assert inputs.cu_seqlens_q is not None
        assert inputs.cu_seqlens_k is not None
        offsets_q, offsets_k = (read_numbers(each) for each in (inputs.cu_seqlens_q, inputs.cu_seqlens_k))
        return cls.of(offsets_q, offsets_k, problem.window_right)

    @classmethod
    def of(cls, offsets_q: Sequence[int], offsets_k: Sequence[int], window_right: int) -> VarlenSequences:
        """The sequences of cu_seqlens_q and cu_seqlens_k."""
        spans_q, spans_k = [], []
        for (first_q, last_q), (first_k, last_k) in zip(
            itertools.pairwise(offsets_q), itertools.pairwise(offsets_k), strict=True
        ):
            hidden = rows_without_keys(last_q - first_q, last_k - first_k, window_right)
            if first_q + hidden < last_q:
                spans_q.append((first_q + hidden, last_q))
                spans_k.append((first_k, last_k))
        return cls(_ends(spans_q), _ends(spans_k), spans_q, spans_k)


def _ends(spans: list[tuple[int, int]]) -> list[int]:
    return list(itertools.accumulate(last - first for first, last in spans))


def forward_varlen(problem: Problem, inputs: Inputs) -> AttentionOutput:
    """One call of the operator, for the queries that have keys."""
    sequences = VarlenSequences.of_call(problem, inputs)
    if not sequences.spans_q:
        return keyless(problem, inputs)
    check_size("tokens of k", inputs.k.shape[0], MAX_TOKENS)
    given, kept_q, _ = take(sequences, inputs)
    out, row_max, row_sum, *_ = run(varlen_call(problem, given, sequences))
    lse = (row_max[..., 0] + row_sum[..., 0].log()).T  # (nheads, tokens)
    if kept_q is None:
        return AttentionOutput(out, lse.contiguous() if problem.return_lse else None)
    output = keyless(problem, inputs)
    output.out[kept_q] = out
    if output.lse is not None:
        output.lse[:, kept_q] = lse
    return output


def varlen_call(problem: Problem, inputs: Inputs, sequences: VarlenSequences) -> OperatorCall:
    """The call for sequences of which every query has keys; inputs hold the tokens of `sequences` only."""
    mask = sparse_mask(problem.window_left, problem.window_right, problem.seqlen_q, problem.seqlen_k)
    varlen = {
        "input_layout": "TND",
        "actual_seq_qlen": sequences.ends_q,
        "actual_seq_kvlen": sequences.ends_k,
        # Without it, the maxima of a sequence are stored heads first, though the tensor's shape says tokens first.
        "softmax_layout": "TND",
    }
    return OperatorCall(TRAINING, _arguments(problem, inputs) | mask_arguments(mask, problem.device, _TOKENS) | varlen)


def take(sequences: VarlenSequences, inputs: Inputs) -> tuple[Inputs, Tensor | None, Tensor | None]:
    """The inputs with the tokens of `sequences` only, and the indices of these in q and k; None where all are kept."""
    kept_q = _kept(sequences.spans_q, inputs.q)
    kept_k = _kept(sequences.spans_k, inputs.k)
    if kept_q is not None:
        inputs = inputs._replace(q=inputs.q[kept_q])
    if kept_k is not None:
        inputs = inputs._replace(k=inputs.k[kept_k], v=inputs.v[kept_k])
    return inputs, kept_q, kept_k


def _kept(spans: list[tuple[int, int]], tensor: Tensor) -> Tensor | None:
    """Indices of the tokens in `spans`, or None when `tensor` has no others."""
    if sum(last - first for first, last in spans) == tensor.shape[0]:
        return None
    return torch.cat([torch.arange(first, last, device=tensor.device) for first, last in spans])


def _arguments(problem: Problem, inputs: Inputs) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "query": inputs.q.contiguous(),
        "key": inputs.k.contiguous(),
        "value": inputs.v.contiguous(),
        "head_num": problem.nheads,
        "scale": problem.softmax_scale,
    }
    return arguments if inputs.sinks is None else arguments | {"sink": inputs.sinks.contiguous()}
