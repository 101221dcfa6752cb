// Plans a call of attention and runs it on the pool with the kernels of an instruction set.
#pragma once

#include "attention/kernel_table.hpp"

namespace fastattention {

// Each returns false when memory to work with could not be had, and throws nothing.

// The caches may then have been appended to already.
bool forward(const AttentionKernels& kernels, const FaAttentionParams& params);

// Gradients of a call without a cache and without pages.
bool backward(const AttentionKernels& kernels, const FaAttentionParams& params, const FaGradients& gradients);

}  // namespace fastattention
