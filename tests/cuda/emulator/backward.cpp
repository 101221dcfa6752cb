// The library of one variant of the backward kernel: the macros of a BackwardConfig say which.
#include "backward.cuh"

#include "launch.hpp"

FA_EMULATED(emulate_backward, fastattention_backward, BackwardParams)
