// The library of the kernel that runs before a backward.
#include "delta.cuh"

#include "launch.hpp"

FA_EMULATED(emulate_delta, fastattention_delta, BackwardParams, fastattention::kDeltaWarps, 0)
