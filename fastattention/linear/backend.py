"""LinearBackend: the interface of backends of linear attention. LINEAR_BACKENDS lists them."""

from __future__ import annotations

from collections.abc import Callable

from fastattention.engine.backend import Backend
from fastattention.engine.registry import Registry
from fastattention.linear.problem import LinearInputs, LinearOutput, LinearProblem

LinearBackend = Backend[LinearProblem, LinearInputs, LinearOutput]
Serve = Callable[[LinearInputs], LinearOutput]

# Most specialized first: `backend="auto"` takes the first that can serve a call.
LINEAR_BACKENDS: Registry[LinearProblem, LinearBackend] = Registry(
    {
        "cuda": "fastattention.backends.cuda.linear.backend:CudaLinearBackend",
        "cpu": "fastattention.backends.cpu.linear.backend:CpuLinearBackend",
        "torch": "fastattention.backends.torch.linear:TorchBackend",
    }
)
