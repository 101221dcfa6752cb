// The element type of a cache: 16-bit elements, or bytes (int8 or float8 e4m3) with a scale per token.
#pragma once

#include "intrinsics.cuh"

namespace fastattention {

constexpr bool kQuantized = Config::quantized;
constexpr bool kInt8 = Config::cache_is_int8;

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
