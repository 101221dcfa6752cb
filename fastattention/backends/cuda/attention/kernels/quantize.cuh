// Quantizes values for a quantized cache; fastattention/quantized.py has the formula.
#pragma once

#include "cache_format.cuh"
#include "element.cuh"
#include "lanes.cuh"

namespace fastattention {

struct Scaled {
    float scale;   // from stored values to values
    float factor;  // from values to stored values
};

// The largest magnitude of some values, and whether all are finite.
struct Extent {
    float amax;
    bool finite;

    template <int kCount>
    FA_DEVICE void add(const float (&x)[kCount]) {
        constexpr float kLargestFloat = 3.402823466e38f;
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            const float magnitude = as_float(as_bits(x[i]) & 0x7fffffffu);
            finite &= magnitude <= kLargestFloat;
            amax = maximum(amax, magnitude);
        }
    }

    // The extent of the values of kLanes neighbouring lanes.
    template <int kLanes>
    FA_DEVICE Extent of_lanes() const {
        const uint32_t first = lane_index() / kLanes * kLanes, all = 0xffffffffu >> (32 - kLanes);
        return {maximum_of_lanes<kLanes>(amax), (lanes_where(!finite) >> first & all) == 0};
    }
};

// The scale and factor for values of an extent. If a value is not finite, the scale is NaN and all stored values are 0.
FA_DEVICE Scaled scaled_for(const Extent& x) {
    constexpr float kLargest = kInt8 ? 127.0f : 448.0f, kLargestFloat = 3.402823466e38f;
    if (!x.finite) return {as_float(0x7fffffffu), 0.0f};
    const float factor = divided(kLargest, x.amax);
    return {divided(x.amax, kLargest), factor <= kLargestFloat ? factor : kLargestFloat};
}

// The scale and factor for a row that kLanes neighbouring lanes hold.
template <int kLanes = 32, int kCount>
FA_DEVICE Scaled scaled_for(const float (&x)[kCount]) {
    Extent extent{0.0f, true};
    extent.add(x);
    return scaled_for(extent.of_lanes<kLanes>());
}

// Rounds a value to the byte of the nearest stored value, ties to even, within -127 ... 127 or -448 ... 448.
FA_DEVICE uint8_t stored(float x) {
    // A value that was not finite has factor 0, and is NaN here.
    if (x != x) return 0;
    if constexpr (kInt8) {
        const int rounded = round_to_integer(x);
        return static_cast<uint8_t>(rounded > 127 ? 127 : rounded < -127 ? -127 : rounded);
    }
    const uint32_t bits = as_bits(x), sign = bits >> 24 & 0x80u;
    const float magnitude = as_float(bits & 0x7fffffffu);
    if (magnitude >= 448.0f) return static_cast<uint8_t>(sign | 0x7eu);
    // Below 2^-6 values are subnormal: multiples of 2^-9. Rounding up to 2^-6 carries into the exponent as it should.
    if (magnitude < 0.015625f)
        return static_cast<uint8_t>(sign | static_cast<uint32_t>(round_to_integer(magnitude * 512.0f)));
    const uint32_t rounded = as_bits(magnitude) + 0x7ffffu + (bits >> 20 & 1u);
    return static_cast<uint8_t>(sign | ((rounded >> 20) - (127u - 7u) * 8u));
}

}  // namespace fastattention
