// Vectors of eight floats in AVX2, FMA and F16C.
#pragma once

#include <immintrin.h>

#include "elements.hpp"

namespace FA_NAMESPACE {

struct Vec {
    static constexpr int kWidth = 8;
    static constexpr int kRegisters = 16;
    __m256 v;
};

FA_INLINE Vec broadcast(float x) { return {_mm256_set1_ps(x)}; }
FA_INLINE Vec zero() { return {_mm256_setzero_ps()}; }
FA_INLINE Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.v, b.v)}; }
FA_INLINE Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.v, b.v)}; }
FA_INLINE Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.v, b.v)}; }
FA_INLINE Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.v, b.v)}; }
FA_INLINE Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
// Returns b if either is NaN.
FA_INLINE Vec maximum(Vec a, Vec b) { return {_mm256_max_ps(a.v, b.v)}; }
FA_INLINE Vec minimum(Vec a, Vec b) { return {_mm256_min_ps(a.v, b.v)}; }
FA_INLINE Vec absolute(Vec a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v)}; }
FA_INLINE Vec iota() { return {_mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7)}; }

FA_INLINE float reduce_max(Vec a) {
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}
FA_INLINE float reduce_add(Vec a) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}

// Returns a where x < limit, else b.
FA_INLINE Vec select_less(Vec x, Vec limit, Vec a, Vec b) {
    return {_mm256_blendv_ps(b.v, a.v, _mm256_cmp_ps(x.v, limit.v, _CMP_LT_OQ))};
}

FA_INLINE Vec from_bits16(__m128i bits, Bfloat16) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16))};
}
FA_INLINE Vec from_bits16(__m128i bits, Float16) { return {_mm256_cvtph_ps(bits)}; }
FA_INLINE __m128i to_bits16(Vec a, Float16) { return _mm256_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
FA_INLINE __m128i to_bits16(Vec a, Bfloat16) {
    // Round to nearest even; a NaN keeps its upper bits, made quiet so that it cannot become an infinity.
    const __m256i bits = _mm256_castps_si256(a.v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i upper = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(upper), _mm256_extracti128_si256(upper, 1));
}

FA_INLINE Vec from_bits8(__m128i bits, Int8) { return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bits))}; }
// Converts by way of float16, whose exponent bias differs by 8: a factor of 2^8. NaN gets float16's exponent of NaN.
FA_INLINE Vec from_bits8(__m128i bits, Float8) {
    const __m128i upper = _mm_slli_epi16(_mm_cvtepu8_epi16(bits), 8);
    const __m128i half = _mm_and_si128(_mm_srai_epi16(upper, 1), _mm_set1_epi16(static_cast<short>(0xbfff)));
    const __m128i nan = _mm_cmpeq_epi16(_mm_slli_epi16(upper, 1), _mm_set1_epi16(static_cast<short>(0xfe00)));
    const __m256 value = _mm256_cvtph_ps(_mm_or_si128(half, _mm_and_si128(nan, _mm_set1_epi16(0x7e00))));
    return {_mm256_mul_ps(value, _mm256_set1_ps(256.0f))};
}

FA_INLINE __m256i first_lanes(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

FA_INLINE Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
FA_INLINE Vec load_partial(const float* p, int n) { return {_mm256_maskload_ps(p, first_lanes(n))}; }
FA_INLINE void store(float* p, Vec a) { _mm256_storeu_ps(p, a.v); }
FA_INLINE void store_partial(float* p, Vec a, int n) { _mm256_maskstore_ps(p, first_lanes(n), a.v); }

template <class Half>
FA_INLINE Vec load(const Half* p) {
    return from_bits16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), Half{});
}
template <class Half>
FA_INLINE Vec load_partial(const Half* p, int n) {
    Half padded[8] = {};
    memcpy(padded, p, n * sizeof(Half));
    return load(padded);
}
template <class Byte>
FA_INLINE Vec load_bytes(const Byte* p) {
    return from_bits8(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)), Byte{});
}
template <class Byte>
FA_INLINE Vec load_bytes_partial(const Byte* p, int n) {
    Byte padded[8] = {};
    memcpy(padded, p, n);
    return load_bytes(padded);
}
FA_INLINE Vec load(const Int8* p) { return load_bytes(p); }
FA_INLINE Vec load(const Float8* p) { return load_bytes(p); }
FA_INLINE Vec load_partial(const Int8* p, int n) { return load_bytes_partial(p, n); }
FA_INLINE Vec load_partial(const Float8* p, int n) { return load_bytes_partial(p, n); }
template <class Half>
FA_INLINE void store(Half* p, Vec a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), to_bits16(a, Half{}));
}
template <class Half>
FA_INLINE void store_partial(Half* p, Vec a, int n) {
    Half padded[8];
    store(padded, a);
    memcpy(p, padded, n * sizeof(Half));
}

// Values are integers of at most 127 in magnitude.
FA_INLINE void store(Int8* p, Vec a) {
    const __m256i numbers = _mm256_cvtps_epi32(a.v);
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(numbers), _mm256_extracti128_si256(numbers, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words, words));
}

FA_INLINE Vec load_pairs(const Bfloat16* p) {
    return {_mm256_castsi256_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
FA_INLINE Vec load_pairs_partial(const Bfloat16* p, int n) {
    Bfloat16 padded[16] = {};
    memcpy(padded, p, n * sizeof(Bfloat16));
    return load_pairs(padded);
}
// The first and the second of each of eight pairs of bfloat16, as floats.
FA_INLINE void widen_pairs(Vec pairs, Vec& first, Vec& second) {
    const __m256i bits = _mm256_castps_si256(pairs.v);
    first = {_mm256_castsi256_ps(_mm256_slli_epi32(bits, 16))};
    second = {_mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(static_cast<int>(0xffff0000u))))};
}

// Stores both interleaved: lane i of `first` and `second` becomes elements 2i and 2i + 1.
FA_INLINE void store_interleaved(float* to, Vec first, Vec second) {
    const __m256 low = _mm256_unpacklo_ps(first.v, second.v), high = _mm256_unpackhi_ps(first.v, second.v);
    _mm256_storeu_ps(to, _mm256_permute2f128_ps(low, high, 0x20));
    _mm256_storeu_ps(to + 8, _mm256_permute2f128_ps(low, high, 0x31));
}

FA_INLINE Vec round_nearest(Vec x) { return {_mm256_round_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }

// 2^n * p for integral n; zero where n is below the smallest normal exponent, NaN where p is.
FA_INLINE Vec scale_exponent(Vec p, Vec n) {
    const __m256i exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(n.v), 23);
    const __m256 scaled = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p.v), exponent));
    return {_mm256_and_ps(scaled, _mm256_cmp_ps(n.v, _mm256_set1_ps(-126.0f), _CMP_NLT_UQ))};
}

// Eight unsigned integers of 32 bits.
using Integers = __m256i;
FA_INLINE Integers broadcast_integer(uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
FA_INLINE Integers integers_from(uint32_t x) {
    return _mm256_add_epi32(broadcast_integer(x), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
FA_INLINE Integers shift_left(Integers x, int bits) { return _mm256_sll_epi32(x, _mm_cvtsi32_si128(bits)); }
// The upper and the lower halves of products.
FA_INLINE void multiply_wide(Integers a, uint32_t b, Integers& high, Integers& low) {
    const __m256i even = _mm256_mul_epu32(a, broadcast_integer(b));
    const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), broadcast_integer(b));
    high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
    low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
}
// Returns a where x < limit, else b.
FA_INLINE Vec select_below(Integers x, uint32_t limit, Vec a, Vec b) {
    const __m256i sign = broadcast_integer(0x80000000u);  // comparisons are signed
    const __m256i below = _mm256_cmpgt_epi32(broadcast_integer(limit ^ 0x80000000u), x ^ sign);
    return {_mm256_blendv_ps(b.v, a.v, _mm256_castsi256_ps(below))};
}

// Vectors of integers, kept as bits in a Vec: eight of 32 bits, or eight quads of four 8-bit integers.
#define FA_HAS_QUADS
FA_INLINE Vec integers_to_floats(Vec a) { return {_mm256_cvtepi32_ps(_mm256_castps_si256(a.v))}; }
// Added to the elements of a quad that are multiplied as unsigned ones.
static constexpr int kQuadOffset = 128;
// acc + the four products of each quad, where a is unsigned and b is signed. Only for processors with AVX-VNNI. In
// assembler, because the intrinsic is not inlined into functions that are compiled for processors without it.
FA_INLINE Vec dot_quads(Vec acc, Vec a, Vec b) {
    __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(acc.v) : "x"(a.v), "x"(b.v));
    return acc;
}

// Lane i of the result is the sum of all lanes of acc[i].
FA_INLINE Vec reduce_columns(const Vec* acc) {
    const __m256 a = _mm256_hadd_ps(_mm256_hadd_ps(acc[0].v, acc[1].v), _mm256_hadd_ps(acc[2].v, acc[3].v));
    const __m256 b = _mm256_hadd_ps(_mm256_hadd_ps(acc[4].v, acc[5].v), _mm256_hadd_ps(acc[6].v, acc[7].v));
    return {_mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31))};
}

// Transposes eight vectors, `stride` floats apart, in place: pairs of floats, then of pairs, then halves.
FA_INLINE void transpose_square(float* square, int64_t stride) {
    __m256 rows[8], pairs[8], fours[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) rows[i] = _mm256_loadu_ps(square + i * stride);
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        pairs[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
        pairs[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4)
#pragma GCC unroll 2
        for (int j = 0; j < 2; ++j) {
            fours[i + 2 * j] = _mm256_shuffle_ps(pairs[i + j], pairs[i + j + 2], 0x44);
            fours[i + 2 * j + 1] = _mm256_shuffle_ps(pairs[i + j], pairs[i + j + 2], 0xee);
        }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        _mm256_storeu_ps(square + i * stride, _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x20));
        _mm256_storeu_ps(square + (i + 4) * stride, _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x31));
    }
}

// Lane i is from[i / kTimes].
template <int kTimes>
FA_INLINE Vec repeat_each(const float* from) {
    if constexpr (kTimes == 1) return load(from);
    const __m256i index = _mm256_srli_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), __builtin_ctz(kTimes));
    return {_mm256_permutevar8x32_ps(load_partial(from, Vec::kWidth / kTimes).v, index)};
}

// Prefetches into the L2 cache: prefetches into L1 occupy fill buffers that current loads need
// (docs/decisions/0004-prefetch-decode-keys-into-l2.md).
FA_INLINE void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }

}  // namespace FA_NAMESPACE
