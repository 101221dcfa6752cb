// The library of one variant of the kernel that computes the causal convolution.
#include "convolution.cuh"

#include "launch.hpp"

FA_EMULATED(emulate_convolution, fastattention_convolution, ConvolutionParams)
