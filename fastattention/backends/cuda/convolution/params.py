"""The arguments of the kernels of the causal convolution, as kernels/convolution_params.h declares them."""

from __future__ import annotations

from pathlib import Path

from fastattention.backends.common.c_struct import params_of

_HEADER = Path(__file__).parent / "kernels" / "convolution_params.h"

ConvolutionParams = params_of(_HEADER, "ConvolutionParams")
ConvolutionBackwardParams = params_of(_HEADER, "ConvolutionBackwardParams")
