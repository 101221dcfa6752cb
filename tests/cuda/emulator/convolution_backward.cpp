// The library of the kernels that compute gradients of the causal convolution.
#include "convolution_backward.cuh"

#include "launch.hpp"

FA_EMULATED(emulate_convolution_backward, fastattention_convolution_backward, ConvolutionBackwardParams)
FA_EMULATED(emulate_convolution_sums, fastattention_convolution_sums, ConvolutionBackwardParams)
