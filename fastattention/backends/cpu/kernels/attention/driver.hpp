// Plans a call of attention and runs it on the thread pool with the kernels of an instruction set.
#pragma once

#include "attention/plan.hpp"

namespace fastattention {

// These functions return false if there is no working memory, and throw nothing.

// If it returns false, keys and values may have been appended to the caches already.
bool forward(const AttentionKernels& kernels, const FaAttentionParams& params);

// Computes the gradients of a call without a cache and without pages.
bool backward(const AttentionKernels& kernels, const FaAttentionParams& params, const FaGradients& gradients);

}  // namespace fastattention
