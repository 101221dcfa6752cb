"""The exact indexer, query by query, written to be read. Every backend is tested against it.

A query scores each key that it sees, and takes the topk keys of the greatest scores:

    score[s] = sum_j weights[j] max(q[j] . k[s], 0)

A score that is not a number counts as the greatest. Of keys with one score the first ones win.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fastattention.indexer.problem import IndexerInputs, IndexerOutput, IndexerProblem


def index(problem: IndexerProblem, inputs: IndexerInputs, dtype: torch.dtype = torch.float64) -> IndexerOutput:
    """The keys of every query in rising order, computed in `dtype`."""
    indices = torch.full(problem.out_shape, -1, dtype=torch.int32, device=problem.device)
    for row, scores in scores_of_queries(problem, inputs, dtype):
        best = torch.sort(scores, descending=True, stable=True).indices[: problem.topk]
        indices[row, : len(best)] = best.sort().values.int()
    return IndexerOutput(indices)


def scores_of_queries(
    problem: IndexerProblem, inputs: IndexerInputs, dtype: torch.dtype = torch.float64
) -> Iterator[tuple[int, Tensor]]:
    """(row of q, scores of the keys that it sees) of every query."""
    for rows, keys in sequences(problem, inputs):
        for row in rows:
            products = (inputs.q[row].to(dtype) @ keys.to(dtype).T).clamp(min=0.0)
            scores = (inputs.weights[row].to(dtype)[:, None] * products).sum(dim=0)
            seen = max(len(keys) - (rows[-1] - row), 0) if problem.causal else len(keys)
            # Sorts of torch on GPUs look at the sign of NaN.
            yield row, scores[:seen].masked_fill(scores[:seen].isnan(), torch.nan)


def sequences(problem: IndexerProblem, inputs: IndexerInputs) -> Iterator[tuple[range, Tensor]]:
    """(rows of q, keys (seqlen_k, headdim)) of every sequence. Reads lengths on their device."""
    if inputs.cu_seqlens_q is None:
        offsets = [problem.seqlen_q * sequence for sequence in range(problem.batch_size + 1)]
    else:
        offsets = inputs.cu_seqlens_q.tolist()
    used = None if inputs.seqused_k is None else inputs.seqused_k.tolist()
    offsets_k = None if inputs.cu_seqlens_k is None else inputs.cu_seqlens_k.tolist()
    for sequence in range(problem.batch_size):
        if inputs.block_table is not None:
            assert used is not None
            pages = inputs.block_table[sequence, : -(-used[sequence] // problem.k_seqlen)]
            keys = inputs.k[pages.long()].flatten(0, 1)
        elif offsets_k is not None:
            keys = inputs.k[0, offsets_k[sequence] : offsets_k[sequence + 1]]
        else:
            keys = inputs.k[sequence]
        yield range(*offsets[sequence : sequence + 2]), keys if used is None else keys[: used[sequence]]
