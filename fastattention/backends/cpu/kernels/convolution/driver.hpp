// Plans a causal convolution and runs it on the thread pool with the kernels of an instruction set.
#pragma once

#include "convolution/kernel_table.hpp"

namespace fastattention {

// Both return false if there is no working memory, and throw nothing.
bool convolution(const ConvolutionKernels& kernels, const FaConvolutionParams& params);
bool convolution_backward(const ConvolutionKernels& kernels, const FaConvolutionParams& params,
                          const FaConvolutionGradients& gradients);

}  // namespace fastattention
