"""What the native kernels of the indexer are told alike on CPUs and GPUs, by the names in both of their structs."""

from __future__ import annotations

from fastattention.indexer.problem import IndexerInputs, IndexerProblem


def shared_params(problem: IndexerProblem, inputs: IndexerInputs) -> dict[str, int]:
    """Sizes and strides of a call. Its tensors may be wider than the problem says, if they are aligned copies."""
    q_row, q_head, _ = inputs.q.stride()
    k_batch, k_row, _ = inputs.k.stride()
    return {
        "batch_size": problem.batch_size,
        "seqlen_q": problem.seqlen_q,
        "nheads": problem.nheads,
        "headdim": inputs.q.shape[-1],
        "k_seqlen": problem.k_seqlen,
        "q_stride_row": q_row,
        "q_stride_head": q_head,
        "k_stride_batch": k_batch,
        "k_stride_row": k_row,
        "weights_stride_row": inputs.weights.stride(0),
        "block_table_stride": 0 if inputs.block_table is None else inputs.block_table.stride(0),
        "topk": problem.topk,
        "causal": problem.causal,
    }
