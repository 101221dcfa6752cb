// The library of one variant of the states of chunked linear attention, chosen by the macros of a StatesConfig.
#include "states.cuh"

#include "launch.hpp"

FA_EMULATED(emulate_linear_states, fastattention_linear_states, ChunkParams, fastattention::kWarps,
            fastattention::Exchange::kBytes)
