// Element types as they lie in memory, and the macros every kernel header needs.
//
// FA_NAMESPACE is defined by the build for each instruction set. Everything compiled with its flags lives in that
// namespace: code that the linker could merge with a copy built for another processor would crash on the older one. That
// is also why kernel headers use no templates of the standard library.
#pragma once

#include <cstdint>
#include <cstring>

#define FA_INLINE static inline __attribute__((always_inline))

namespace FA_NAMESPACE {

struct Bfloat16 {
    uint16_t bits;
};
struct Float16 {
    uint16_t bits;
};
// Quantized elements, which a scale multiplies.
struct Int8 {
    int8_t value;
};
struct Float8 {
    uint8_t bits;  // e4m3: a sign, four bits of exponent with a bias of 7, three of mantissa; no infinities, 0x7f is NaN
};

template <class Element>
constexpr bool kQuantized = false;
template <>
constexpr bool kQuantized<Int8> = true;
template <>
constexpr bool kQuantized<Float8> = true;

static constexpr float kInfinity = __builtin_inff();
static constexpr float kNan = __builtin_nanf("");
static constexpr float kLargest = 3.402823466e38f;
static constexpr float kLog2E = 1.44269504088896340736f;
static constexpr float kLn2 = 0.69314718055994530942f;

FA_INLINE constexpr int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
FA_INLINE constexpr int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
constexpr int64_t common_multiple(int64_t a, int64_t b) {
    int64_t multiple = a;
    while (multiple % b != 0) multiple += a;
    return multiple;
}
FA_INLINE int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

}  // namespace FA_NAMESPACE
