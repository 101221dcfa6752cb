// The library of one variant of chunked linear attention: the macros of a StatesConfig say which.
#include "states.cuh"

#include "launch.hpp"

FA_EMULATED(emulate_linear_states, fastattention_linear_states, ChunkParams)
