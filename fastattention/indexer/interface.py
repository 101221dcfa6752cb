"""The public function of the indexer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec

from torch import Tensor

from fastattention.attention.key_tokens import KeyTokens
from fastattention.engine.checks import check_rank, spec_of
from fastattention.engine.kinds import check_readable
from fastattention.engine.operator import serves_requests
from fastattention.errors import ArgumentError
from fastattention.indexer.operators import INDEXER
from fastattention.indexer.problem import IndexerInputs
from fastattention.indexer.validation import read_options

Arguments = ParamSpec("Arguments")


def _indexer(read: Callable[Arguments, Any]) -> Callable[Arguments, Tensor]:
    return serves_requests(read)


@_indexer
def fast_indexer_func(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    topk: int,
    causal: bool = True,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    backend: str = "auto",
) -> Any:
    """The keys of the greatest index scores of each query. Memory does not grow with seqlen_q x seqlen_k.

        score[t, s] = sum_j weights[t, j] max(q[t, j] . k[s], 0)

    A scale of the products belongs into the weights, if it is positive. Scores are computed in float32.

    - `q`: (batch_size, seqlen_q, nheads, headdim), float32, bfloat16 or float16; with cu_seqlens_q (total_q, nheads,
        headdim)
    - `k`: one key a token for all heads, (batch_size, seqlen_k, headdim); with cu_seqlens_k (total_k, headdim); with
        block_table pages (num_blocks, page_block_size, headdim)
    - `weights`: (batch_size, seqlen_q, nheads), with cu_seqlens_q (total_q, nheads); any of the three dtypes
    - `topk`: how many keys a query gets, at most
    - `causal`: drops keys behind the query; aligned to the bottom right, so the last query may get every key
    - `seqused_k`: int32 (batch_size,), how many tokens of each sequence there are; None means all. Needed with
        block_table, whose rows may hold more.

    Queries and keys of one call may be varlen or not, independently.

    Returns int32 (batch_size, seqlen_q, topk), with cu_seqlens_q (total_q, topk): positions of keys within the sequence
    of the query, in rising order, then -1 where a query sees fewer than topk. Of keys with one score the first ones
    win. A score that is not a number counts as the greatest. Results have the same bits in every run. On Ascend NPUs
    these three are up to torch_npu's operator. There are no gradients. Raises ArgumentError for wrong arguments,
    UnsupportedError when the backend named cannot serve the call.
    """
    try:
        tokens = KeyTokens.of({"k": k}, "headdim", cu_seqlens_k, block_table, seqused_k)
        keys = k if cu_seqlens_k is None else k[None]
        of_keys = cu_seqlens_k, tokens.used, block_table
        if cu_seqlens_q is not None:
            given = IndexerInputs(q, keys, weights, cu_seqlens_q, *of_keys)
            return INDEXER, given, read_options(topk, causal), backend, lambda result: result.indices
        check_rank("q", spec_of("q", q), "batch_size, seqlen_q, nheads, headdim")
        batch = q.shape[:2]
        if spec_of("weights", weights).shape != q.shape[:3]:
            raise ArgumentError(
                f"weights must be (batch_size, seqlen_q, nheads) = {tuple(q.shape[:3])}, got {tuple(weights.shape)}"
            )
        given = IndexerInputs(q.flatten(0, 1), keys, weights.flatten(0, 1), None, *of_keys)
    except RuntimeError:
        check_readable({"q": q, "k": k, "weights": weights})
        raise
    options = read_options(topk, causal, batch[0])
    return INDEXER, given, options, backend, lambda result: result.indices.view(*batch, options.topk)
