// The library of the kernels that quantize queries and keys.
#include "quantize_rows.cuh"

#include "launch.hpp"

FA_EMULATED(emulate_sum_keys, fastattention_sum_keys, QuantizeParams, fastattention::kQuantizeThreads / 32,
            fastattention::kSumBytes)
FA_EMULATED(emulate_quantize_rows, fastattention_quantize_rows, QuantizeParams, fastattention::kQuantizeThreads / 32,
            fastattention::kSumBytes)
