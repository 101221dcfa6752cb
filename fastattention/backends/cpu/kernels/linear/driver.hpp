// Plans a call of linear attention and runs it on the thread pool with the kernels of an instruction set.
#pragma once

#include "linear/plan.hpp"

namespace fastattention {

// Returns false if there is no working memory, and throws nothing.
bool linear(const LinearKernels& kernels, const FaLinearParams& params);

}  // namespace fastattention
