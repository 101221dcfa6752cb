// Constants and small functions of plain numbers.
#pragma once

#include "intrinsics.cuh"

namespace fastattention {

constexpr float kLog2E = 1.44269504088896340736f;
constexpr float kLn2 = 0.69314718055994530942f;

FA_DEVICE float infinity() { return as_float(0x7f800000u); }
FA_DEVICE float quiet_nan() { return as_float(0x7fffffffu); }
FA_DEVICE float larger(float a, float b) { return a > b ? a : b; }

// What exponents of a row are relative to. Of one that has seen no key: with any finite shift, -inf becomes 0 and a NaN is
// not lost.
FA_DEVICE float shift_of(float row_max) { return row_max == -infinity() ? 0.0f : row_max; }

// Divides numbers below 2^31 by multiplication: with l = ceil(log2(size)), multiplier = ceil(2^(31 + l) / size) and shift =
// l - 1; by 1 without a multiplier. A division takes longer than a decode has before its first copy, or for each page.
struct Divisor {
    int size, multiplier, shift;

    FA_DEVICE int quotient_of(int x) const {
        if (multiplier == 0) return x;
        return static_cast<int>(multiply_high(static_cast<uint32_t>(x), static_cast<uint32_t>(multiplier)) >> shift);
    }
};

// Of numbers that are not negative. A division takes a while, and this is often by 1.
FA_DEVICE int quotient(int a, int b) {
    return b == 1 ? a : static_cast<int>(static_cast<uint32_t>(a) / static_cast<uint32_t>(b));
}

}  // namespace fastattention
