// The library of one variant of the kernel that adds parts up.
#include "sum_parts.cuh"

#include "launch.hpp"

FA_EMULATED(emulate_sum_parts, fastattention_sum_parts, SumParams, fastattention::kSumWarps, 0)
