// 16-bit numbers.
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

// Of q, k, v and out in memory.
#if FA_BFLOAT16
using Element = Bfloat16;
#else
using Element = Float16;
#endif

// What caches hold: 0, elements; otherwise one byte of a number that its token's scale multiplies, 1 int8 or 2 float8
// (e4m3).
constexpr int kCacheFormat = FA_CACHE_FORMAT;
constexpr bool kQuantized = kCacheFormat != 0;
constexpr bool kInt8 = kCacheFormat == 1;

template <bool kIsByte>
struct CacheItemOf {
    using Type = uint16_t;
};
template <>
struct CacheItemOf<true> {
    using Type = uint8_t;
};
using CacheItem = CacheItemOf<kQuantized>::Type;

}  // namespace fastattention
