"""CpuIndexerCall: a call of the native library, set up once for all calls whose tensors have the same strides."""

from __future__ import annotations

import ctypes

import torch

from fastattention.backends.common.indexer import shared_params
from fastattention.backends.common.layout import pointers
from fastattention.backends.cpu.headers import DTYPE_CODES, STRUCTS, pointer_packer
from fastattention.backends.cpu.library import load_library
from fastattention.indexer.problem import IndexerInputs, IndexerOutput, IndexerProblem
from fastattention.threads import get_num_threads

CpuIndexerParams = STRUCTS["FaIndexerParams"]


class CpuIndexerCall:
    """The indexer for tensors with the strides of `inputs`. Any number of threads may call it at a time."""

    def __init__(self, problem: IndexerProblem, inputs: IndexerInputs) -> None:
        template = CpuIndexerParams.template(
            **shared_params(problem, inputs), dtype=DTYPE_CODES[problem.dtype], total_q=problem.total_q, num_threads=0
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
