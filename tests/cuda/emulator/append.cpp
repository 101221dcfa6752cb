// The library of one variant of the kernel that writes caches.
#include "append.cuh"

#include "launch.hpp"

FA_EMULATED(emulate_append, fastattention_append, AppendParams)
