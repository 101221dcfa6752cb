"""ConvolutionBackend: the interface of backends of the causal convolution. CONVOLUTION_BACKENDS lists them."""

from __future__ import annotations

from collections.abc import Callable

from fastattention.convolution.problem import ConvolutionInputs, ConvolutionOutput, ConvolutionProblem
from fastattention.engine.backend import Backend
from fastattention.engine.registry import Registry

ConvolutionBackend = Backend[ConvolutionProblem, ConvolutionInputs, ConvolutionOutput]
Serve = Callable[[ConvolutionInputs], ConvolutionOutput]

# Most specialized first: `backend="auto"` takes the first that can serve a call.
CONVOLUTION_BACKENDS: Registry[ConvolutionProblem, ConvolutionBackend] = Registry(
    {
        "cuda": "fastattention.backends.cuda.convolution.backend:CudaConvolutionBackend",
        "cpu": "fastattention.backends.cpu.convolution.backend:CpuConvolutionBackend",
        "torch": "fastattention.backends.torch.convolution:TorchConvolutionBackend",
    }
)
