// Plans one attention call and runs it on the pool with the kernels of an instruction set.
#pragma once

#include "params.h"
#include "plan.hpp"

namespace fastattention {

// Returns false when memory to work with could not be had; the caches may then have been appended to already. Throws nothing.
bool forward(const Kernels& kernels, const FaAttentionParams& params);

}  // namespace fastattention
