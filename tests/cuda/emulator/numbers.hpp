// Converts 16-bit floats in integer arithmetic: exact, the same on every processor, and simple enough to be vectorized.
#pragma once

#include <cstdint>
#include <cstring>

namespace emulator {

inline float float_of_bits(std::uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

inline std::uint32_t bits_of_float(float x) {
    std::uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

inline float float16_to_float(std::uint16_t x) {
    // Exponent biases differ by 112. The product is exact and normalizes subnormal values.
    const float magnitude = float_of_bits(static_cast<std::uint32_t>(x & 0x7fffu) << 13) * 0x1p112f;
    const std::uint32_t special = (x & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u;  // infinity and NaN
    return float_of_bits(bits_of_float(magnitude) | special | static_cast<std::uint32_t>(x & 0x8000u) << 16);
}

// Rounds to nearest even; 65520 and above become infinity.
inline std::uint16_t float_to_float16(float x) {
    const std::uint32_t bits = bits_of_float(x), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return 0x7fff;
    if (magnitude >= 0x477ff000u) return static_cast<std::uint16_t>(sign | 0x7c00u);
    if (magnitude < 0x38800000u) {
        // Subnormal: the addition rounds to a multiple n of 2^-24, with n in the low bits.
        const std::uint32_t sum = bits_of_float(float_of_bits(magnitude) + 0.5f);
        return static_cast<std::uint16_t>(sign | (sum - 0x3f000000u));
    }
    const std::uint32_t rounded = magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u);
    return static_cast<std::uint16_t>(sign | rounded >> 13);
}

inline float bfloat16_to_float(std::uint16_t x) { return float_of_bits(static_cast<std::uint32_t>(x) << 16); }

inline std::uint16_t float_to_bfloat16(float x) {
    const std::uint32_t bits = bits_of_float(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
    return static_cast<std::uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

}  // namespace emulator
