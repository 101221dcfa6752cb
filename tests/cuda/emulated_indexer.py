"""The cuda backend of the indexer on tensors of the processor."""

from __future__ import annotations

from emulated_backend import OneChip
from emulator import Range

from fastattention.backends.common.c_struct import Params
from fastattention.backends.cuda.indexer.backend import CudaIndexerBackend
from fastattention.gpu_runtime.chips import CHIPS
from fastattention.indexer.problem import IndexerProblem


class EmulatedIndexer(OneChip, CudaIndexerBackend):
    """The backend as if on a chip with some multiprocessors. With none, each CTA has all keys of its queries."""

    def __init__(self, chip: str, num_sms: int = 4) -> None:
        super().__init__(num_sms)
        self.limits = CHIPS[chip]._replace(num_sms=num_sms)

    def ranges_of(self, params: Params, problem: IndexerProblem) -> list[Range]:
        """The memory that a launch may access in vectors: q, keys, and scores."""
        last_q = (problem.total_q - 1) * params.q_stride_row + (problem.nheads - 1) * params.q_stride_head
        last_k = (problem.k_rows - 1) * params.k_stride_batch + (problem.k_seqlen - 1) * params.k_stride_row
        ranges = [Range(params.scores, 4 * params.num_rows * params.scores_stride)]
        ranges.append(Range(params.q, 2 * (last_q + params.headdim)))
        if problem.k_rows * problem.k_seqlen:
            ranges.append(Range(params.k, 2 * (last_k + params.headdim)))
        return ranges
