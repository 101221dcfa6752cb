// The library of the kernels that quantize queries and keys.
#include "quantize_rows.cuh"

#include "launch.hpp"

FA_EMULATED(emulate_sum_keys, fastattention_sum_keys, QuantizeParams)
FA_EMULATED(emulate_quantize_rows, fastattention_quantize_rows, QuantizeParams)
