// 16-bit floating-point formats.
#pragma once

#include "intrinsics.cuh"

namespace fastattention {

struct Float16 {
    static constexpr bool kIsBfloat16 = false;
    static FA_DEVICE uint32_t pack(float low, float high) { return pack_float16(low, high); }
    static FA_DEVICE float widen(uint16_t bits) { return float16_to_float(bits); }
};

struct Bfloat16 {
    static constexpr bool kIsBfloat16 = true;
    static FA_DEVICE uint32_t pack(float low, float high) { return pack_bfloat16(low, high); }
    static FA_DEVICE float widen(uint16_t bits) { return as_float(static_cast<uint32_t>(bits) << 16); }
};

template <bool kIsBfloat16>
struct ElementOf {
    using Type = Float16;
};
template <>
struct ElementOf<true> {
    using Type = Bfloat16;
};

// The dtype of q, k, v and out in memory.
using Element = ElementOf<Config::bfloat16>::Type;

}  // namespace fastattention
