// The library of one variant of the backward that sums gradients of queries.
#include "summed_backward.cuh"

#include "launch.hpp"

FA_EMULATED(emulate_backward, fastattention_backward, BackwardParams)
FA_EMULATED(emulate_round_queries, fastattention_round_queries, BackwardParams)
