// The library of one variant of the backward kernel, chosen by the macros of a BackwardConfig.
#include "backward.cuh"

#include "launch.hpp"

FA_EMULATED(emulate_backward, fastattention_backward, BackwardParams)
