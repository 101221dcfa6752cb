"""CpuIndexerCall: a call of the native library, set up once for all calls whose tensors have the same strides."""

from __future__ import annotations

import ctypes

import torch

from fastattention.backends.common.layout import pointers
from fastattention.backends.cpu.headers import DTYPE_CODES, STRUCTS, pointer_packer
from fastattention.backends.cpu.library import load_library
from fastattention.indexer.problem import IndexerInputs, IndexerOutput, IndexerProblem
from fastattention.threads import get_num_threads

CpuIndexerParams = STRUCTS["FaIndexerParams"]


class CpuIndexerCall:
    """The indexer for tensors with the strides of `inputs`. Any number of threads may call it at a time."""

    def __init__(self, problem: IndexerProblem, inputs: IndexerInputs) -> None:
        q_row, q_head, _ = inputs.q.stride()
        k_batch, k_row, _ = inputs.k.stride()
        template = CpuIndexerParams.template(
            dtype=DTYPE_CODES[problem.dtype],
            total_q=problem.total_q,
            batch_size=problem.batch_size,
            seqlen_q=problem.seqlen_q,
            nheads=problem.nheads,
            headdim=problem.headdim,
            k_seqlen=problem.k_seqlen,
            q_stride_row=q_row,
            q_stride_head=q_head,
            k_stride_batch=k_batch,
            k_stride_row=k_row,
            weights_stride_row=inputs.weights.stride(0),
            block_table_stride=0 if inputs.block_table is None else inputs.block_table.stride(0),
            topk=problem.topk,
            causal=problem.causal,
            num_threads=0,
        )
        self._params = CpuIndexerParams.from_buffer_copy(template)
        self._params_at = ctypes.addressof(self._params)
        self._pack = pointer_packer(CpuIndexerParams, "indices", *IndexerInputs._fields)
        self._shape = problem.out_shape

    def __call__(self, inputs: IndexerInputs) -> IndexerOutput:
        """One call of the native library."""
        indices = torch.empty(self._shape, dtype=torch.int32, device="cpu")
        addresses = self._pack(*pointers(indices, *inputs))
        if load_library().indexer(self._params_at, addresses, get_num_threads()) != 0:
            raise MemoryError("fastattention could not get working memory for an indexer")
        return IndexerOutput(indices)
