// The library of one variant of the forward kernel: the macros of a KernelConfig say which.
#include "forward.cuh"

#include "launch.hpp"

FA_EMULATED(emulate_forward, fastattention_forward, AttentionParams)
