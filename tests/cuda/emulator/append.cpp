// The library of one variant of the kernel that appends to a cache.
#include "append.cuh"

#include "launch.hpp"

FA_EMULATED(emulate_append, fastattention_append, AppendParams, fastattention::kAppendWarps, 0)
