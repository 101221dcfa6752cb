// The library of one variant of the kernel that prepares chunked linear attention with a gate for every key dimension.
#include "prepare_keys.cuh"

#include "launch.hpp"

FA_EMULATED(emulate_linear_prepare_keys, fastattention_linear_prepare_keys, ChunkParams, fastattention::kThreads / 32,
            fastattention::kSharedMemory)
