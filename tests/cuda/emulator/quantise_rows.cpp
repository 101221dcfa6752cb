// The library of the kernels that make bytes of queries and keys.
#include "quantise_rows.cuh"

#include "launch.hpp"

FA_EMULATED(emulate_sum_keys, fastattention_sum_keys, QuantiseParams, fastattention::kQuantiseThreads / 32,
            fastattention::kSumBytes)
FA_EMULATED(emulate_quantise_rows, fastattention_quantise_rows, QuantiseParams, fastattention::kQuantiseThreads / 32,
            fastattention::kSumBytes)
