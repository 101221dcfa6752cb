// The library of one variant of chunked linear attention: the macros of an OutputsConfig say which.
#include "outputs.cuh"

#include "launch.hpp"

FA_EMULATED(emulate_linear_outputs, fastattention_linear_outputs, ChunkParams)
