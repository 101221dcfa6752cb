// Plans a call of linear attention and runs it on the pool with the kernels of an instruction set.
#pragma once

#include "linear/kernel_table.hpp"

namespace fastattention {

// Returns false when memory to work with could not be had, and throws nothing.
bool linear(const LinearKernels& kernels, const FaLinearParams& params);

}  // namespace fastattention
