// Vectors of four floats in the compiler's own vector types, for any processor.
#pragma once

#include <cmath>

#include "elements.hpp"

namespace FA_NAMESPACE {

typedef float Float4 __attribute__((vector_size(16)));
typedef int32_t Int4 __attribute__((vector_size(16)));
typedef uint32_t Uint4 __attribute__((vector_size(16)));

struct Vec {
    static constexpr int kWidth = 4;
    static constexpr int kRegisters = 16;
    Float4 v;
};

FA_INLINE Vec broadcast(float x) { return {Float4{x, x, x, x}}; }
FA_INLINE Vec zero() { return broadcast(0.0f); }
FA_INLINE Vec operator+(Vec a, Vec b) { return {a.v + b.v}; }
FA_INLINE Vec operator-(Vec a, Vec b) { return {a.v - b.v}; }
FA_INLINE Vec operator*(Vec a, Vec b) { return {a.v * b.v}; }
FA_INLINE Vec operator/(Vec a, Vec b) { return {a.v / b.v}; }
FA_INLINE Vec fma(Vec a, Vec b, Vec c) { return {a.v * b.v + c.v}; }  // contracted where the processor can
FA_INLINE Vec choose(Int4 where, Vec a, Vec b) { return {(Float4)(((Int4)a.v & where) | ((Int4)b.v & ~where))}; }
// Returns b if either is NaN.
FA_INLINE Vec maximum(Vec a, Vec b) { return choose((Int4)(a.v > b.v), a, b); }
FA_INLINE Vec minimum(Vec a, Vec b) { return choose((Int4)(a.v < b.v), a, b); }
FA_INLINE Vec absolute(Vec a) { return {(Float4)((Int4)a.v & 0x7fffffff)}; }
FA_INLINE Vec iota() { return {Float4{0.0f, 1.0f, 2.0f, 3.0f}}; }

FA_INLINE float reduce_max(Vec a) {
    const float x = a.v[0] > a.v[1] ? a.v[0] : a.v[1];
    const float y = a.v[2] > a.v[3] ? a.v[2] : a.v[3];
    return x > y ? x : y;
}
FA_INLINE float reduce_add(Vec a) { return (a.v[0] + a.v[2]) + (a.v[1] + a.v[3]); }

// Returns a where x < limit, else b.
FA_INLINE Vec select_less(Vec x, Vec limit, Vec a, Vec b) { return choose((Int4)(x.v < limit.v), a, b); }

// Values are integers of at most 127 in magnitude.
FA_INLINE void store(Int8* to, Vec a) {
    for (int i = 0; i < 4; ++i) to[i].value = static_cast<int8_t>(a.v[i]);
}

// Four integers of 32 bits, given as their bits.
FA_INLINE Vec integers_to_floats(Vec a) { return {__builtin_convertvector((Int4)a.v, Float4)}; }

// Four unsigned integers of 32 bits.
using Integers = Uint4;
FA_INLINE Integers broadcast_integer(uint32_t x) { return Uint4{x, x, x, x}; }
FA_INLINE Integers integers_from(uint32_t x) { return Uint4{x, x + 1, x + 2, x + 3}; }
FA_INLINE Integers shift_left(Integers x, int bits) { return x << bits; }
// The upper and the lower halves of products.
FA_INLINE void multiply_wide(Integers a, uint32_t b, Integers& high, Integers& low) {
    for (int i = 0; i < 4; ++i) high[i] = static_cast<uint32_t>(static_cast<uint64_t>(a[i]) * b >> 32);
    low = a * b;
}
// Returns a where x < limit, else b.
FA_INLINE Vec select_below(Integers x, uint32_t limit, Vec a, Vec b) { return choose((Int4)(x < limit), a, b); }

FA_INLINE float to_float(Bfloat16 x) {
    const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

FA_INLINE float to_float(Float16 x) {
    const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000) << 16;
    const uint32_t magnitude = x.bits & 0x7fff;
    if (magnitude < 0x0400) {  // zero or subnormal: a multiple of 2^-24
        const float value = static_cast<float>(magnitude) * 0x1p-24f;
        return sign ? -value : value;
    }
    uint32_t bits = (magnitude << 13) + (112u << 23);
    if (magnitude >= 0x7c00) bits += 112u << 23;  // infinity or NaN
    bits |= sign;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

FA_INLINE float to_float(Int8 x) { return x.value; }

FA_INLINE float to_float(Float8 x) {
    const uint32_t magnitude = x.bits & 0x7f;
    if (magnitude == 0x7f) return kNan;
    // Converts by way of float16, whose exponent bias differs by 8: a factor of 2^8.
    return to_float(Float16{static_cast<uint16_t>((x.bits & 0x80) << 8 | magnitude << 7)}) * 256.0f;
}

FA_INLINE Bfloat16 to_half(float x, Bfloat16) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (x != x) return {static_cast<uint16_t>((bits >> 16) | 0x40)};
    return {static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

FA_INLINE Float16 to_half(float x, Float16) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return {static_cast<uint16_t>(sign | 0x7e00)};
    if (bits >= 0x477ff000) return {static_cast<uint16_t>(sign | 0x7c00)};  // 65520 and above round to infinity
    if (bits < 0x38800000) {                                               // below 2^-14: subnormal
        float magnitude;
        memcpy(&magnitude, &bits, 4);
        const float shifted = magnitude + 0.5f;  // aligns 2^-24 with the last bit, so that the addition rounds
        uint32_t rounded;
        memcpy(&rounded, &shifted, 4);
        return {static_cast<uint16_t>(sign | (rounded - 0x3f000000))};
    }
    return {static_cast<uint16_t>(sign | ((bits - (112u << 23) + 0x0fff + ((bits >> 13) & 1)) >> 13))};
}

FA_INLINE Vec load(const float* p) {
    Vec a;
    memcpy(&a.v, p, 16);
    return a;
}
FA_INLINE void store(float* p, Vec a) { memcpy(p, &a.v, 16); }
FA_INLINE Vec load_partial(const float* p, int n) {
    Vec a = zero();
    for (int i = 0; i < n; ++i) a.v[i] = p[i];
    return a;
}
FA_INLINE void store_partial(float* p, Vec a, int n) {
    for (int i = 0; i < n; ++i) p[i] = a.v[i];
}

template <class Half>
FA_INLINE Vec load_partial(const Half* p, int n) {
    Vec a = zero();
    for (int i = 0; i < n; ++i) a.v[i] = to_float(p[i]);
    return a;
}
template <class Half>
FA_INLINE Vec load(const Half* p) {
    return load_partial(p, 4);
}
FA_INLINE Vec load_pairs_partial(const Bfloat16* p, int n) {
    Vec a = zero();
    memcpy(&a.v, p, n * sizeof(Bfloat16));
    return a;
}
FA_INLINE Vec load_pairs(const Bfloat16* p) { return load_pairs_partial(p, 8); }
// The first and the second of each of four pairs of bfloat16, as floats.
FA_INLINE void widen_pairs(Vec pairs, Vec& first, Vec& second) {
    const Uint4 bits = (Uint4)pairs.v;
    first = {(Float4)(bits << 16)};
    second = {(Float4)(bits & 0xffff0000u)};
}
// Stores both interleaved: lane i of `first` and `second` becomes elements 2i and 2i + 1.
FA_INLINE void store_interleaved(float* to, Vec first, Vec second) {
    for (int i = 0; i < 4; ++i) {
        to[2 * i] = first.v[i];
        to[2 * i + 1] = second.v[i];
    }
}

template <class Half>
FA_INLINE void store_partial(Half* p, Vec a, int n) {
    for (int i = 0; i < n; ++i) p[i] = to_half(a.v[i], Half{});
}
template <class Half>
FA_INLINE void store(Half* p, Vec a) {
    store_partial(p, a, 4);
}

// Nearest integer for |x| < 2^22: adding 1.5 * 2^23 leaves no fraction bits.
FA_INLINE Vec round_nearest(Vec x) {
    volatile float magic_value = 12582912.0f;
    const Vec magic = broadcast(magic_value);
    return {(x.v + magic.v) - magic.v};
}

// 2^n * p for integral n; zero where n is below the smallest normal exponent, NaN where p is.
FA_INLINE Vec scale_exponent(Vec p, Vec n) {
    const Int4 exponent = __builtin_convertvector(n.v, Int4) << 23;
    const Int4 scaled = (Int4)p.v + exponent;
    return {(Float4)(scaled & ~(Int4)(n.v < -126.0f))};
}

// Lane i of the result is the sum of all lanes of acc[i].
FA_INLINE Vec reduce_columns(const Vec* acc) {
    return {Float4{reduce_add(acc[0]), reduce_add(acc[1]), reduce_add(acc[2]), reduce_add(acc[3])}};
}

// Transposes four vectors, `stride` floats apart, in place.
FA_INLINE void transpose_square(float* square, int64_t stride) {
    for (int i = 0; i < Vec::kWidth; ++i)
        for (int j = 0; j < i; ++j) {
            const float upper = square[j * stride + i];
            square[j * stride + i] = square[i * stride + j];
            square[i * stride + j] = upper;
        }
}

// Lane i is from[i / kTimes].
template <int kTimes>
FA_INLINE Vec repeat_each(const float* from) {
    return {Float4{from[0], from[1 / kTimes], from[2 / kTimes], from[3 / kTimes]}};
}

FA_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

}  // namespace FA_NAMESPACE
