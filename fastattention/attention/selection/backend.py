"""SelectionBackend: the interface of backends of the selection. SELECTION_BACKENDS lists them."""

from __future__ import annotations

from collections.abc import Callable

from fastattention.attention.selection.problem import SelectionInputs, SelectionOutput, SelectionProblem
from fastattention.engine.backend import Backend
from fastattention.engine.registry import Registry

SelectionBackend = Backend[SelectionProblem, SelectionInputs, SelectionOutput]
Serve = Callable[[SelectionInputs], SelectionOutput]

# Most specialized first: `backend="auto"` takes the first that can serve a call.
SELECTION_BACKENDS: Registry[SelectionProblem, SelectionBackend] = Registry(
    {
        "cuda": "fastattention.backends.cuda.selection.backend:CudaSelectionBackend",
        "cpu": "fastattention.backends.cpu.selection:CpuSelectionBackend",
        "torch": "fastattention.backends.torch.selection:TorchSelectionBackend",
    }
)
