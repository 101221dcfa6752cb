// Plans a call of linear attention and runs it on the thread pool with the kernels of an instruction set.
#pragma once

#include "linear/kernel_table.hpp"

namespace fastattention {

// Both return false if there is no working memory, and throw nothing.
bool linear(const LinearKernels& kernels, const FaLinearParams& params);
bool linear_backward(const LinearKernels& kernels, const FaLinearParams& params, const FaLinearGradients& gradients);

}  // namespace fastattention
