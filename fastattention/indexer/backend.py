"""IndexerBackend: the interface of backends of the indexer. INDEXER_BACKENDS lists them."""

from __future__ import annotations

from collections.abc import Callable

from fastattention.engine.backend import Backend
from fastattention.engine.registry import Registry
from fastattention.indexer.problem import IndexerInputs, IndexerOutput, IndexerProblem

IndexerBackend = Backend[IndexerProblem, IndexerInputs, IndexerOutput]
Serve = Callable[[IndexerInputs], IndexerOutput]

# Most specialized first: `backend="auto"` takes the first that can serve a call.
INDEXER_BACKENDS: Registry[IndexerProblem, IndexerBackend] = Registry(
    {
        "cuda": "fastattention.backends.cuda.indexer.backend:CudaIndexerBackend",
        "ascend": "fastattention.backends.ascend.indexer:AscendIndexerBackend",
        "cpu": "fastattention.backends.cpu.indexer.backend:CpuIndexerBackend",
        "torch": "fastattention.backends.torch.indexer:TorchIndexerBackend",
    }
)
