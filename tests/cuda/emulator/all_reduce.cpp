// The library of one variant of the all-reduce kernel.
#include "all_reduce.cuh"

#include "launch.hpp"

FA_EMULATED(emulate_all_reduce, fastattention_all_reduce, AllReduceParams)
