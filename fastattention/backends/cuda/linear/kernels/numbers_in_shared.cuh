// Floats in shared memory.
#pragma once

#include "intrinsics.cuh"

namespace fastattention {

FA_DEVICE float load_number(uint32_t at) { return as_float(load_shared_32(at)); }
FA_DEVICE void store_number(uint32_t at, float x) { store_shared_32(at, as_bits(x)); }

FA_DEVICE void load_numbers(uint32_t at, float* four) {
    const Words4 words = load_shared_128(at);
#pragma unroll
    for (int i = 0; i < 4; ++i) four[i] = as_float(words.word[i]);
}

FA_DEVICE bool is_finite(float x) { return x - x == 0.0f; }

}  // namespace fastattention
