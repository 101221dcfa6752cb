// The library of one variant of the gradients of states of delta rules, chosen by the macros of a StateGradientsConfig.
#include "state_gradients.cuh"

#include "launch.hpp"

FA_EMULATED(emulate_linear_state_gradients, fastattention_linear_state_gradients, ChunkParams)
