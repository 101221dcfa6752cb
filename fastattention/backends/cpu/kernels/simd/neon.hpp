// Vectors of four floats in NEON; with FA_HAS_HALF_DOT also FEAT_FHM and FEAT_DotProd, with FA_HAS_BF16_DOT also FEAT_BF16
// and FEAT_I8MM. Products of other elements than floats are in neon_products.hpp.
#pragma once

#include <arm_neon.h>

#include "elements.hpp"

namespace FA_NAMESPACE {

struct Vec {
    static constexpr int kWidth = 4;
    static constexpr int kRegisters = 32;
    float32x4_t v;
};

FA_INLINE Vec broadcast(float x) { return {vdupq_n_f32(x)}; }
FA_INLINE Vec zero() { return {vdupq_n_f32(0.0f)}; }
FA_INLINE Vec operator+(Vec a, Vec b) { return {vaddq_f32(a.v, b.v)}; }
FA_INLINE Vec operator-(Vec a, Vec b) { return {vsubq_f32(a.v, b.v)}; }
FA_INLINE Vec operator*(Vec a, Vec b) { return {vmulq_f32(a.v, b.v)}; }
FA_INLINE Vec operator/(Vec a, Vec b) { return {vdivq_f32(a.v, b.v)}; }
FA_INLINE Vec fma(Vec a, Vec b, Vec c) { return {vfmaq_f32(c.v, a.v, b.v)}; }
// These return NaN if either is NaN.
FA_INLINE Vec maximum(Vec a, Vec b) { return {vmaxq_f32(a.v, b.v)}; }
FA_INLINE Vec minimum(Vec a, Vec b) { return {vminq_f32(a.v, b.v)}; }
FA_INLINE Vec absolute(Vec a) { return {vabsq_f32(a.v)}; }
FA_INLINE float reduce_max(Vec a) { return vmaxvq_f32(a.v); }
FA_INLINE float reduce_add(Vec a) { return vaddvq_f32(a.v); }
FA_INLINE Vec iota() {
    alignas(16) static constexpr float kLanes[4] = {0, 1, 2, 3};
    return {vld1q_f32(kLanes)};
}

// Returns a where x < limit, else b.
FA_INLINE Vec select_less(Vec x, Vec limit, Vec a, Vec b) { return {vbslq_f32(vcltq_f32(x.v, limit.v), a.v, b.v)}; }

// One lane of a vector, as an operand that is the same for all lanes of a product.
#define FA_HAS_LANES
template <int kIndex>
struct Lane {
    Vec of;
};
template <int kIndex>
FA_INLINE Vec fma(Lane<kIndex> a, Vec b, Vec c) {
    return {vfmaq_laneq_f32(c.v, b.v, a.of.v, kIndex)};
}

FA_INLINE Vec from_bits16(uint16x4_t bits, Bfloat16) { return {vreinterpretq_f32_u32(vshll_n_u16(bits, 16))}; }
FA_INLINE Vec from_bits16(uint16x4_t bits, Float16) { return {vcvt_f32_f16(vreinterpret_f16_u16(bits))}; }
FA_INLINE uint16x4_t to_bits16(Vec a, Float16) { return vreinterpret_u16_f16(vcvt_f16_f32(a.v)); }
FA_INLINE uint16x4_t to_bits16(Vec a, Bfloat16) {
#ifdef FA_HAS_BF16_DOT
    return vreinterpret_u16_bf16(vcvt_bf16_f32(a.v));
#else
    // Round to nearest even; a NaN keeps its upper bits, made quiet so that it cannot become an infinity.
    const uint32x4_t bits = vreinterpretq_u32_f32(a.v);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
    return vshrn_n_u32(vbslq_u32(vceqq_f32(a.v, a.v), rounded, quiet), 16);
#endif
}

FA_INLINE Vec from_bits8(uint8x8_t bits, Int8) {
    return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(bits)))))};
}
// Converts by way of float16, whose exponent bias differs by 8: a factor of 2^8. NaN gets float16's exponent of NaN.
FA_INLINE Vec from_bits8(uint8x8_t bits, Float8) {
    const uint16x4_t upper = vshl_n_u16(vget_low_u16(vmovl_u8(bits)), 8);
    const int16x4_t shifted = vshr_n_s16(vreinterpret_s16_u16(upper), 1);
    const uint16x4_t half = vand_u16(vreinterpret_u16_s16(shifted), vdup_n_u16(0xbfff));
    const uint16x4_t nan = vceq_u16(vshl_n_u16(upper, 1), vdup_n_u16(0xfe00));
    const Vec value = from_bits16(vorr_u16(half, vand_u16(nan, vdup_n_u16(0x7e00))), Float16{});
    return value * broadcast(256.0f);
}

FA_INLINE Vec load(const float* p) { return {vld1q_f32(p)}; }
FA_INLINE void store(float* p, Vec a) { vst1q_f32(p, a.v); }
template <class Half>
FA_INLINE Vec load(const Half* p) {
    return from_bits16(vld1_u16(reinterpret_cast<const uint16_t*>(p)), Half{});
}
template <class Half>
FA_INLINE void store(Half* p, Vec a) {
    vst1_u16(reinterpret_cast<uint16_t*>(p), to_bits16(a, Half{}));
}
template <class Byte>
FA_INLINE Vec load_bytes(const Byte* p) {
    uint32_t four;
    memcpy(&four, p, 4);
    return from_bits8(vreinterpret_u8_u32(vdup_n_u32(four)), Byte{});
}
FA_INLINE Vec load(const Int8* p) { return load_bytes(p); }
FA_INLINE Vec load(const Float8* p) { return load_bytes(p); }
// Values are integers of at most 127 in magnitude.
FA_INLINE void store(Int8* p, Vec a) {
    const int16x4_t words = vmovn_s32(vcvtq_s32_f32(a.v));
    const int8x8_t bytes = vmovn_s16(vcombine_s16(words, words));
    const uint32_t four = vget_lane_u32(vreinterpret_u32_s8(bytes), 0);
    memcpy(p, &four, 4);
}

template <class Element>
FA_INLINE Vec load_partial(const Element* p, int n) {
    Element padded[4] = {};
    memcpy(padded, p, n * sizeof(Element));
    return load(padded);
}
template <class Element>
FA_INLINE void store_partial(Element* p, Vec a, int n) {
    Element padded[4];
    store(padded, a);
    memcpy(p, padded, n * sizeof(Element));
}

template <class Half>
FA_INLINE Vec load_pairs(const Half* p) {
    return {vreinterpretq_f32_u16(vld1q_u16(reinterpret_cast<const uint16_t*>(p)))};
}
template <class Half>
FA_INLINE Vec load_pairs_partial(const Half* p, int n) {
    Half padded[8] = {};
    memcpy(padded, p, n * sizeof(Half));
    return load_pairs(padded);
}
// The first and the second of each of four pairs of bfloat16, as floats.
FA_INLINE void widen_pairs(Vec pairs, Vec& first, Vec& second) {
    const uint32x4_t bits = vreinterpretq_u32_f32(pairs.v);
    first = {vreinterpretq_f32_u32(vshlq_n_u32(bits, 16))};
    second = {vreinterpretq_f32_u32(vandq_u32(bits, vdupq_n_u32(0xffff0000u)))};
}
// Stores both interleaved: lane i of `first` and `second` becomes elements 2i and 2i + 1.
FA_INLINE void store_interleaved(float* to, Vec first, Vec second) {
    vst1q_f32(to, vzip1q_f32(first.v, second.v));
    vst1q_f32(to + 4, vzip2q_f32(first.v, second.v));
}
// The first halves of both, and the second halves.
FA_INLINE void pair_halves(Vec a, Vec b, Vec& first, Vec& second) {
    const float64x2_t x = vreinterpretq_f64_f32(a.v), y = vreinterpretq_f64_f32(b.v);
    first = {vreinterpretq_f32_f64(vzip1q_f64(x, y))};
    second = {vreinterpretq_f32_f64(vzip2q_f64(x, y))};
}

// 1.5 * 2^23: a sum with it has no fraction bits, and the nearest integer in its last ones, if that is small. Conversions
// would take as long as four additions.
static constexpr float kRounding = 12582912.0f;

// Nearest integer for |x| < 2^22.
FA_INLINE Vec round_nearest(Vec x) { return (x + broadcast(kRounding)) - broadcast(kRounding); }

// 2^n * p for integral n; zero where n is below the smallest normal exponent, NaN where p is. The exponent -127 has the bits
// of zero.
FA_INLINE Vec scale_exponent(Vec p, Vec n) {
    const Vec biased = maximum(n, broadcast(-127.0f)) + broadcast(kRounding + 127.0f);
    return p * Vec{vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_f32(biased.v), 23))};
}

// Four unsigned integers of 32 bits.
using Integers = uint32x4_t;
FA_INLINE Integers broadcast_integer(uint32_t x) { return vdupq_n_u32(x); }
FA_INLINE Integers integers_from(uint32_t x) {
    alignas(16) static constexpr uint32_t kLanes[4] = {0, 1, 2, 3};
    return vaddq_u32(vdupq_n_u32(x), vld1q_u32(kLanes));
}
FA_INLINE Integers shift_left(Integers x, int bits) { return vshlq_u32(x, vdupq_n_s32(bits)); }
// The upper and the lower halves of products.
FA_INLINE void multiply_wide(Integers a, uint32_t b, Integers& high, Integers& low) {
    const uint32x4_t first = vreinterpretq_u32_u64(vmull_n_u32(vget_low_u32(a), b));
    const uint32x4_t second = vreinterpretq_u32_u64(vmull_n_u32(vget_high_u32(a), b));
    low = vuzp1q_u32(first, second);
    high = vuzp2q_u32(first, second);
}
// Returns a where x < limit, else b.
FA_INLINE Vec select_below(Integers x, uint32_t limit, Vec a, Vec b) {
    return {vbslq_f32(vcltq_u32(x, vdupq_n_u32(limit)), a.v, b.v)};
}

// Lane i of the result is the sum of all lanes of acc[i].
FA_INLINE Vec reduce_columns(const Vec* acc) {
    return {vpaddq_f32(vpaddq_f32(acc[0].v, acc[1].v), vpaddq_f32(acc[2].v, acc[3].v))};
}

// Transposes four vectors, `stride` floats apart, in place.
FA_INLINE void transpose_square(float* square, int64_t stride) {
    const float32x4_t a = vld1q_f32(square), b = vld1q_f32(square + stride);
    const float32x4_t c = vld1q_f32(square + 2 * stride), d = vld1q_f32(square + 3 * stride);
    const float64x2_t ab_even = vreinterpretq_f64_f32(vtrn1q_f32(a, b)), ab_odd = vreinterpretq_f64_f32(vtrn2q_f32(a, b));
    const float64x2_t cd_even = vreinterpretq_f64_f32(vtrn1q_f32(c, d)), cd_odd = vreinterpretq_f64_f32(vtrn2q_f32(c, d));
    vst1q_f32(square, vreinterpretq_f32_f64(vzip1q_f64(ab_even, cd_even)));
    vst1q_f32(square + stride, vreinterpretq_f32_f64(vzip1q_f64(ab_odd, cd_odd)));
    vst1q_f32(square + 2 * stride, vreinterpretq_f32_f64(vzip2q_f64(ab_even, cd_even)));
    vst1q_f32(square + 3 * stride, vreinterpretq_f32_f64(vzip2q_f64(ab_odd, cd_odd)));
}

// Lane i is from[i / kTimes].
template <int kTimes>
FA_INLINE Vec repeat_each(const float* from) {
    if constexpr (kTimes == 1) return load(from);
    if constexpr (kTimes == 2) {
        const float32x2_t two = vld1_f32(from);
        return {vcombine_f32(vdup_lane_f32(two, 0), vdup_lane_f32(two, 1))};
    }
    return broadcast(from[0]);
}

FA_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

}  // namespace FA_NAMESPACE

#include "neon_products.hpp"
