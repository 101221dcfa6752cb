// Plans a call and runs it on the pool with the kernels of an instruction set.
#pragma once

#include "params.h"
#include "plan.hpp"

namespace fastattention {

// Each returns false when memory to work with could not be had, and throws nothing.

// The caches may then have been appended to already.
bool forward(const Kernels& kernels, const FaAttentionParams& params);

// Gradients of a call without a cache and without pages.
bool backward(const Kernels& kernels, const FaAttentionParams& params, const FaGradients& gradients);

bool linear(const Kernels& kernels, const FaLinearParams& params);

}  // namespace fastattention
