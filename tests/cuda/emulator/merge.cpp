// The library of one variant of the kernel that merges attention over parts of the keys.
#include "merge.cuh"

#include "launch.hpp"

FA_EMULATED(emulate_merge, fastattention_merge, MergeParams, fastattention::kMergeWarps, 0)
