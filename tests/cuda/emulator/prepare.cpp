// The library of one variant of what chunked linear attention prepares.
#include "prepare.cuh"

#include "launch.hpp"

FA_EMULATED(emulate_linear_prepare, fastattention_linear_prepare, ChunkParams)
