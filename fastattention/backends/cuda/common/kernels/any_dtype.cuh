// Elements whose dtype is known at run time: gates of linear attention, filters and states of a convolution.
#pragma once

#include "dtype_code.h"
#include "element.cuh"

namespace fastattention {

// An element as it lies in memory: whoever widened it would wait for it. dtype: a DtypeCode.
FA_DEVICE uint32_t read_bits(const void* elements, int64_t at, int dtype) {
    return dtype == kFloat32 ? static_cast<const uint32_t*>(elements)[at] : static_cast<const uint16_t*>(elements)[at];
}

FA_DEVICE float widen_bits(uint32_t bits, int dtype) {
    if (dtype == kFloat32) return as_float(bits);
    const uint16_t half = static_cast<uint16_t>(bits);
    return dtype == kFloat16 ? Float16::widen(half) : Bfloat16::widen(half);
}

// Rounds x to an element.
FA_DEVICE void write_any(void* elements, int64_t at, int dtype, float x) {
    if (dtype == kFloat32) {
        static_cast<float*>(elements)[at] = x;
    } else {
        const uint32_t bits = dtype == kFloat16 ? Float16::pack(x, 0.0f) : Bfloat16::pack(x, 0.0f);
        static_cast<uint16_t*>(elements)[at] = static_cast<uint16_t>(bits);
    }
}

}  // namespace fastattention
