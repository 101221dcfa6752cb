// The library of one variant of the forward kernel, chosen by the macros of a KernelConfig.
#include "forward.cuh"

#include "launch.hpp"

FA_EMULATED(emulate_forward, fastattention_forward, AttentionParams, fastattention::kWarps, fastattention::kSharedMemory)
