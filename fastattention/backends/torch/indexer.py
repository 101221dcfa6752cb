"""The torch backend of the indexer: operations of torch, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from fastattention.indexer.backend import IndexerBackend, Serve
from fastattention.indexer.problem import IndexerInputs, IndexerOutput, IndexerProblem
from fastattention.indexer.reference import sequences

_PRODUCTS = 1 << 26  # products of queries and keys that are in memory at a time: 256 MB


class TorchIndexerBackend(IndexerBackend):
    """Computes in float32, some queries at a time."""

    name = "torch"
    reads_numbers = True

    def why_unavailable(self) -> str | None:
        """Never: torch is always there."""
        return None

    def why_not(self, problem: IndexerProblem) -> str | None:
        """Serves everything."""
        return None

    def make_call(self, problem: IndexerProblem, inputs: IndexerInputs) -> Serve:
        """The computation itself; nothing is prepared."""
        return lambda inputs: index(problem, inputs)


@torch.no_grad()
def index(problem: IndexerProblem, inputs: IndexerInputs) -> IndexerOutput:
    """The keys of every query."""
    indices = torch.full(problem.out_shape, -1, dtype=torch.int32, device=problem.device)
    for rows, keys in sequences(problem, inputs):
        keys = keys.float()
        step = max(_PRODUCTS // max(len(keys) * problem.nheads, 1), 1)
        for first in range(rows.start, rows.stop, step):
            last = min(first + step, rows.stop)
            scores = _scores(inputs.q[first:last].float(), keys, inputs.weights[first:last])
            if problem.causal:
                seen = torch.arange(first, last, device=problem.device) + (len(keys) - rows.stop)
                hidden = torch.arange(len(keys), device=problem.device) > seen[:, None]
            else:
                hidden = torch.zeros_like(scores, dtype=torch.bool)
            _write_best(indices[first:last], scores, hidden)
    return IndexerOutput(indices)


def _scores(q: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """(queries, seqlen_k) from q (queries, nheads, headdim)."""
    products = (q.flatten(0, 1) @ keys.T).clamp_(min=0.0).view(*q.shape[:2], len(keys))
    scores = (weights[:, None] @ products)[:, 0]
    return scores.masked_fill_(scores.isnan(), torch.nan)  # sorts of torch on GPUs look at the sign of NaN


def _write_best(indices: Tensor, scores: Tensor, hidden: Tensor) -> None:
    """Writes the keys of the greatest scores to indices, which are -1."""
    count = min(indices.shape[1], scores.shape[1])
    # The second sort keeps the order of the first: keys that are hidden come last, even if others are -inf.
    order = scores.sort(dim=1, descending=True, stable=True).indices
    order = order.gather(1, hidden.gather(1, order).sort(dim=1, stable=True).indices)[:, :count]
    is_hidden = hidden.gather(1, order)
    best = order.masked_fill(is_hidden, scores.shape[1]).sort(dim=1).values
    indices[:, :count] = best.masked_fill(best == scores.shape[1], -1)
