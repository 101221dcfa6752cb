// The backward that sums gradients of queries in memory, and the kernel that turns the sums into gradients.
#pragma once

#include "backward.cuh"

// After fastattention_backward.
extern "C" FA_KERNEL void FA_LAUNCH_BOUNDS(fastattention::kThreads, 1)
    fastattention_round_queries(FA_PARAMETER fastattention::BackwardParams params) {
    fastattention::round_queries<fastattention::Arch>(params);
}
