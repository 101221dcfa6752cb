// The library of one variant of the kernel that scores keys for an indexer.
#include "key_scores.cuh"

#include "launch.hpp"

FA_EMULATED(emulate_key_scores, fastattention_key_scores, IndexerParams)
