// The instruction sets that the library was built for, and which of them this processor runs.
#pragma once

#include "plan.hpp"

namespace fastattention {

// Number of instruction sets this processor runs; the last is the fastest.
int num_isas();
const Kernels& isa_kernels(int index);

// Whether this processor has the instructions with which these kernels multiply int8.
bool has_int8_dot(const Kernels& kernels);

}  // namespace fastattention
