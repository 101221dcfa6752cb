// The library of the kernel that finds the keys of the greatest scores.
#include "top_keys.cuh"

#include "launch.hpp"

FA_EMULATED(emulate_top_keys, fastattention_top_keys, IndexerParams)
