// The library of one variant of the kernel that prepares chunked linear attention with one gate per head.
#include "prepare.cuh"

#include "launch.hpp"

FA_EMULATED(emulate_linear_prepare, fastattention_linear_prepare, ChunkParams, fastattention::kWarps,
            fastattention::ChunkMemory::kBytes)
