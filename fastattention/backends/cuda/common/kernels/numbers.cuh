// Constants and small functions of scalars.
#pragma once

#include "intrinsics.cuh"

namespace fastattention {

constexpr float kLog2E = 1.44269504088896340736f;
constexpr float kLn2 = 0.69314718055994530942f;

FA_DEVICE float infinity() { return as_float(0x7f800000u); }
FA_DEVICE float quiet_nan() { return as_float(0x7fffffffu); }
FA_DEVICE float larger(float a, float b) { return a > b ? a : b; }

// The shift of a row's exponents. A row that has seen no key gets 0: with a finite shift, exp(-inf) is 0 and a NaN is kept.
FA_DEVICE float shift_of(float row_max) { return row_max == -infinity() ? 0.0f : row_max; }

// Divides integers below 2^31 by multiplication: with l = ceil(log2(size)), multiplier = ceil(2^(31 + l) / size) and shift =
// l - 1. Multiplier 0 stands for size 1. Divisions would be too slow before the first copy of a decode, and for each page.
struct Divisor {
    int size, multiplier, shift;

    FA_DEVICE int quotient_of(int x) const {
        if (multiplier == 0) return x;
        return static_cast<int>(multiply_high(static_cast<uint32_t>(x), static_cast<uint32_t>(multiplier)) >> shift);
    }
};

// a / b for integers that are not negative. A division is slow, and b is often 1.
FA_DEVICE int quotient(int a, int b) {
    return b == 1 ? a : static_cast<int>(static_cast<uint32_t>(a) / static_cast<uint32_t>(b));
}

}  // namespace fastattention
