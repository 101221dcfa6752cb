// The library of the kernel before a backward.
#include "delta.cuh"

#include "launch.hpp"

FA_EMULATED(emulate_delta, fastattention_delta, BackwardParams)
