// The library of one variant of the outputs of chunked linear attention, chosen by the macros of an OutputsConfig.
#include "outputs.cuh"

#include "launch.hpp"

FA_EMULATED(emulate_linear_outputs, fastattention_linear_outputs, ChunkParams, fastattention::kWarps,
            fastattention::Outputs::kBytes)
