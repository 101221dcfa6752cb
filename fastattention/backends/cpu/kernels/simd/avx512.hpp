// Vectors of sixteen floats in AVX-512 F, BW, VL and DQ; with FA_HAS_BF16_DOT also AVX512_BF16.
#pragma once

#include <immintrin.h>

#include "elements.hpp"

namespace FA_NAMESPACE {

struct Vec {
    static constexpr int kWidth = 16;
    static constexpr int kRegisters = 32;
    __m512 v;
};

FA_INLINE Vec broadcast(float x) { return {_mm512_set1_ps(x)}; }
FA_INLINE Vec zero() { return {_mm512_setzero_ps()}; }
FA_INLINE Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
FA_INLINE Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
FA_INLINE Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
FA_INLINE Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
FA_INLINE Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// Returns b if either is NaN.
FA_INLINE Vec maximum(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
FA_INLINE Vec minimum(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
FA_INLINE Vec absolute(Vec a) { return {_mm512_abs_ps(a.v)}; }
FA_INLINE float reduce_max(Vec a) { return _mm512_reduce_max_ps(a.v); }
FA_INLINE float reduce_add(Vec a) { return _mm512_reduce_add_ps(a.v); }
FA_INLINE Vec iota() { return {_mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)}; }

// Returns a where x < limit, else b.
FA_INLINE Vec select_less(Vec x, Vec limit, Vec a, Vec b) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(x.v, limit.v, _CMP_LT_OQ), b.v, a.v)};
}

// Whether a > b in any lane.
FA_INLINE bool any_greater(Vec a, Vec b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ) != 0; }

FA_INLINE __mmask16 first_lanes(int n) { return static_cast<__mmask16>((1u << n) - 1u); }

FA_INLINE Vec from_bits16(__m256i bits, Bfloat16) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
}
FA_INLINE Vec from_bits16(__m256i bits, Float16) { return {_mm512_cvtph_ps(bits)}; }
FA_INLINE __m256i to_bits16(Vec a, Float16) { return _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
FA_INLINE __m256i to_bits16(Vec a, Bfloat16) {
#ifdef FA_HAS_BF16_DOT
    return (__m256i)_mm512_cvtneps_pbh(a.v);
#else
    // Round to nearest even; a NaN keeps its upper bits, made quiet so that it cannot become an infinity.
    const __m512i bits = _mm512_castps_si512(a.v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
    const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, nan, quiet), 16));
#endif
}

FA_INLINE Vec from_bits8(__m128i bits, Int8) { return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bits))}; }
// Converts by way of float16, whose exponent bias differs by 8: a factor of 2^8. NaN gets float16's exponent of NaN.
FA_INLINE Vec from_bits8(__m128i bits, Float8) {
    const __m256i upper = _mm256_slli_epi16(_mm256_cvtepu8_epi16(bits), 8);
    const __m256i half = _mm256_and_si256(_mm256_srai_epi16(upper, 1), _mm256_set1_epi16(static_cast<short>(0xbfff)));
    const __m256i magnitude = _mm256_slli_epi16(upper, 1);
    const __mmask16 nan = _mm256_cmpeq_epi16_mask(magnitude, _mm256_set1_epi16(static_cast<short>(0xfe00)));
    const __m512 value = _mm512_cvtph_ps(_mm256_mask_mov_epi16(half, nan, _mm256_set1_epi16(0x7e00)));
    return {_mm512_mul_ps(value, _mm512_set1_ps(256.0f))};
}

FA_INLINE Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
FA_INLINE Vec load_partial(const float* p, int n) { return {_mm512_maskz_loadu_ps(first_lanes(n), p)}; }
FA_INLINE void store(float* p, Vec a) { _mm512_storeu_ps(p, a.v); }
FA_INLINE void store_partial(float* p, Vec a, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), a.v); }

template <class Half>
FA_INLINE Vec load(const Half* p) {
    return from_bits16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), Half{});
}
template <class Half>
FA_INLINE Vec load_partial(const Half* p, int n) {
    return from_bits16(_mm256_maskz_loadu_epi16(first_lanes(n), p), Half{});
}
FA_INLINE Vec load(const Int8* p) { return from_bits8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), Int8{}); }
FA_INLINE Vec load(const Float8* p) { return from_bits8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), Float8{}); }
FA_INLINE Vec load_partial(const Int8* p, int n) { return from_bits8(_mm_maskz_loadu_epi8(first_lanes(n), p), Int8{}); }
FA_INLINE Vec load_partial(const Float8* p, int n) { return from_bits8(_mm_maskz_loadu_epi8(first_lanes(n), p), Float8{}); }
template <class Half>
FA_INLINE void store(Half* p, Vec a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_bits16(a, Half{}));
}
template <class Half>
FA_INLINE void store_partial(Half* p, Vec a, int n) {
    _mm256_mask_storeu_epi16(p, first_lanes(n), to_bits16(a, Half{}));
}

// Stores both, one after the other.
FA_INLINE void store_two(float* p, Vec first, Vec second) {
    store(p, first);
    store(p + 16, second);
}
#ifdef FA_HAS_BF16_DOT
// Elements of both as bfloat16, one after the other.
FA_INLINE Vec narrow_two(Vec first, Vec second) {
    return {_mm512_castsi512_ps((__m512i)_mm512_cvtne2ps_pbh(second.v, first.v))};
}
FA_INLINE void store_two(Bfloat16* p, Vec first, Vec second) { _mm512_storeu_ps(p, narrow_two(first, second).v); }
#endif

// Values are integers of at most 127 in magnitude.
FA_INLINE void store(Int8* p, Vec a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(a.v)));
}

FA_INLINE Vec load_pairs(const Bfloat16* p) { return {_mm512_castsi512_ps(_mm512_loadu_si512(p))}; }
FA_INLINE Vec load_pairs_partial(const Bfloat16* p, int n) {
    return {_mm512_castsi512_ps(_mm512_maskz_loadu_epi16(static_cast<__mmask32>((1ull << n) - 1ull), p))};
}
// The first and the second of each of sixteen pairs of bfloat16, as floats.
FA_INLINE void widen_pairs(Vec pairs, Vec& first, Vec& second) {
    const __m512i bits = _mm512_castps_si512(pairs.v);
    first = {_mm512_castsi512_ps(_mm512_slli_epi32(bits, 16))};
    second = {_mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(static_cast<int>(0xffff0000u))))};
}

// Stores both interleaved: lane i of `first` and `second` becomes elements 2i and 2i + 1.
FA_INLINE void store_interleaved(float* to, Vec first, Vec second) {
    const __m512i index = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i upper = _mm512_add_epi32(index, _mm512_set1_epi32(8));
    _mm512_storeu_ps(to, _mm512_permutex2var_ps(first.v, index, second.v));
    _mm512_storeu_ps(to + 16, _mm512_permutex2var_ps(first.v, upper, second.v));
}

FA_INLINE Vec round_nearest(Vec x) { return {_mm512_roundscale_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }

// Returns x less its floor, 0 for -inf.
#define FA_HAS_ABOVE_FLOOR
FA_INLINE Vec above_floor(Vec x) { return {_mm512_reduce_ps(x.v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)}; }
// 2^floor(n) * p; exact zero far below the smallest float.
FA_INLINE Vec scale_exponent(Vec p, Vec n) { return {_mm512_scalef_ps(p.v, n.v)}; }

FA_INLINE __m512 add_lanes(__m512 a, __m512 b) { return _mm512_add_ps(a, b); }
FA_INLINE __m512i add_lanes(__m512i a, __m512i b) { return _mm512_add_epi32(a, b); }

// Lane i of the result is the sum of all lanes of acc[i]. Each step adds two vectors' halves with one shuffle and one
// blend; the lanes come out in bit-reversed order of the pairing, which is why acc is paired at distance 8, 4, 2, 1.
template <class Lanes>
FA_INLINE Vec reduce_columns_as(const Vec* acc) {
    __m512 t[8], u[4], w[2];
    auto add = [](__m512 a, __m512 b) __attribute__((always_inline)) { return (__m512)add_lanes((Lanes)a, (Lanes)b); };
    for (int i = 0; i < 8; ++i) {
        const __m512 x = acc[i].v, y = acc[i + 8].v;
        t[i] = add(_mm512_mask_blend_ps(0xff00, x, y), _mm512_shuffle_f32x4(x, y, 0x4e));
    }
    for (int i = 0; i < 4; ++i) {
        const __m512 x = t[i], y = t[i + 4];
        const __m512d crossed = _mm512_castps_pd(_mm512_mask_blend_ps(0x0f0f, x, y));
        const __m512 swapped = _mm512_castpd_ps(_mm512_permutex_pd(crossed, 0x4e));
        u[i] = add(_mm512_mask_blend_ps(0xf0f0, x, y), swapped);
    }
    for (int i = 0; i < 2; ++i) {
        const __m512 x = u[i], y = u[i + 2];
        w[i] = add(_mm512_mask_blend_ps(0xcccc, x, y), _mm512_shuffle_ps(x, y, 0x4e));
    }
    const __m512 x = w[0], y = w[1];
    const __m512 even = _mm512_mask_blend_ps(0xaaaa, x, y);
    return {add(even, _mm512_permute_ps(_mm512_mask_blend_ps(0x5555, x, y), 0xb1))};
}
FA_INLINE Vec reduce_columns(const Vec* acc) { return reduce_columns_as<__m512>(acc); }

// Sixteen unsigned integers of 32 bits.
using Integers = __m512i;
FA_INLINE Integers broadcast_integer(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
FA_INLINE Integers integers_from(uint32_t x) {
    return _mm512_add_epi32(broadcast_integer(x), _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
}
FA_INLINE Integers shift_left(Integers x, int bits) { return _mm512_sll_epi32(x, _mm_cvtsi32_si128(bits)); }
// The upper and the lower halves of products.
FA_INLINE void multiply_wide(Integers a, uint32_t b, Integers& high, Integers& low) {
    const __m512i even = _mm512_mul_epu32(a, broadcast_integer(b));
    const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), broadcast_integer(b));
    high = _mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd);
    low = _mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64(odd, 32));
}
// Returns a where x < limit, else b.
FA_INLINE Vec select_below(Integers x, uint32_t limit, Vec a, Vec b) {
    return {_mm512_mask_blend_ps(_mm512_cmplt_epu32_mask(x, broadcast_integer(limit)), b.v, a.v)};
}

// Vectors of integers, kept as bits in a Vec: 16 of 32 bits, 32 of 16 bits (words), or 16 quads of four 8-bit integers.
#define FA_HAS_WORDS
#define FA_HAS_QUADS
FA_INLINE Vec from_integers(__m512i a) { return {_mm512_castsi512_ps(a)}; }
FA_INLINE __m512i to_integers(Vec a) { return _mm512_castps_si512(a.v); }
FA_INLINE Vec integers_to_floats(Vec a) { return {_mm512_cvtepi32_ps(to_integers(a))}; }
// Does for integers what reduce_columns does for floats; the result is floats.
FA_INLINE Vec reduce_integer_columns(const Vec* acc) { return integers_to_floats(reduce_columns_as<__m512i>(acc)); }

FA_INLINE Vec load_words(const Int8* p) {
    return from_integers(_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
}
FA_INLINE Vec load_words_partial(const Int8* p, int n) {
    const __mmask32 lanes = static_cast<__mmask32>((1ull << n) - 1ull);
    return from_integers(_mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8(lanes, p)));
}
// acc + a.even * b.even + a.odd * b.odd over sixteen pairs of words.
FA_INLINE Vec dot_words(Vec acc, Vec a, Vec b) {
#ifdef FA_HAS_VNNI
    return from_integers(_mm512_dpwssd_epi32(to_integers(acc), to_integers(a), to_integers(b)));
#else
    return from_integers(_mm512_add_epi32(to_integers(acc), _mm512_madd_epi16(to_integers(a), to_integers(b))));
#endif
}
// Added to the elements of a quad that are multiplied as unsigned ones.
static constexpr int kQuadOffset = 128;
// acc + the four products of each quad, where a is unsigned and b is signed. Only for processors with AVX512_VNNI. In
// assembler, because the intrinsic is not inlined into functions that are compiled for processors without it.
FA_INLINE Vec dot_quads(Vec acc, Vec a, Vec b) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(acc.v) : "v"(a.v), "v"(b.v));
    return acc;
}
FA_INLINE __m256i round_words(Vec a) { return _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(a.v)); }
FA_INLINE void store_words(uint16_t* to, __m256i words) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), words); }

#ifdef FA_HAS_BF16_DOT
// acc + a.even * b.even + a.odd * b.odd over sixteen pairs of bfloat16.
FA_INLINE Vec dot_pairs(Vec acc, Vec a, Vec b) {
    return {_mm512_dpbf16_ps(acc.v, (__m512bh)_mm512_castps_si512(a.v), (__m512bh)_mm512_castps_si512(b.v))};
}
#endif

// Probabilities of kGroup rows, 16 bits each, key by key, become pairs of neighbouring keys: to[(pair * kGroup + g) * 2 + k]
// is key 2 * pair + k of row g. p: numbers i ... i + 15 in the first order.
template <int kGroup>
FA_INLINE void store_key_pairs(uint16_t* to, int64_t i, __m256i p) {
    alignas(32) static constexpr struct Order {
        uint16_t lane[16] = {};
        constexpr Order() {
            for (int i = 0; i < 16; ++i) lane[i] = (i / (2 * kGroup) * 2 + i % 2) * kGroup + i / 2 % kGroup;
        }
    } order;
    const __m256i index = _mm256_load_si256(reinterpret_cast<const __m256i*>(order.lane));
    const __m256i pairs = _mm256_permutexvar_epi16(index, p);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), pairs);
}

// Interleave the low or the high half of each 128-bit lane of two rows: pairs (a[i], b[i]). Columns come out in an order
// that restore_columns undoes.
FA_INLINE Vec interleave_low(Vec a, Vec b) {
    return {_mm512_castsi512_ps(_mm512_unpacklo_epi16(_mm512_castps_si512(a.v), _mm512_castps_si512(b.v)))};
}
FA_INLINE Vec interleave_high(Vec a, Vec b) {
    return {_mm512_castsi512_ps(_mm512_unpackhi_epi16(_mm512_castps_si512(a.v), _mm512_castps_si512(b.v)))};
}
// Undoes the order of interleave_low and interleave_high on two accumulators of sixteen columns each.
FA_INLINE void restore_columns(Vec low, Vec high, Vec& first, Vec& second) {
    const __m512i index_first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i index_second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    first.v = _mm512_permutex2var_ps(low.v, index_first, high.v);
    second.v = _mm512_permutex2var_ps(low.v, index_second, high.v);
}

// Pairs of rows of words for multiply_word_pairs, and the order of its columns.
FA_INLINE void pair_words(Vec a, Vec b, Vec& first, Vec& second) {
    first = interleave_low(a, b);
    second = interleave_high(a, b);
}
FA_INLINE void restore_word_columns(Vec a, Vec b, Vec& first, Vec& second) { restore_columns(a, b, first, second); }
// by: a pair of words in every lane.
FA_INLINE Vec multiply_word_pairs(Vec acc, Vec pairs, Vec by) { return dot_words(acc, pairs, by); }

#ifdef FA_HAS_BF16_DOT
// Rounds both to bfloat16 and interleaves their lanes as pairs.
FA_INLINE Vec to_pairs(Vec first, Vec second) {
    const __m512i low = _mm512_cvtepu16_epi32(to_bits16(first, Bfloat16{}));
    const __m512i high = _mm512_slli_epi32(_mm512_cvtepu16_epi32(to_bits16(second, Bfloat16{})), 16);
    return {_mm512_castsi512_ps(_mm512_or_si512(low, high))};
}

// Stores pairs (a[i], b[i]) of two rows of 32 elements, each vector in the order of its 128-bit lanes: faster than in order.
FA_INLINE void store_in_lanes(float* to, Vec a, Vec b) {
    const __m512i x = _mm512_castps_si512(a.v), y = _mm512_castps_si512(b.v);
    _mm512_storeu_si512(to, _mm512_unpacklo_epi16(x, y));
    _mm512_storeu_si512(to + 16, _mm512_unpackhi_epi16(x, y));
}
// The element whose pair is at a place of store_in_lanes.
FA_INLINE int64_t element_in_lanes(int64_t place) { return place % 16 / 4 * 8 + place / 16 * 4 + place % 4; }

// Pairs (a[i], b[i]) of two rows of 32 elements, in order.
FA_INLINE void interleave_pairs(Vec a, Vec b, Vec& first, Vec& second) {
    alignas(64) static constexpr struct Order {
        uint16_t lane[2][32] = {};
        constexpr Order() {
            for (int i = 0; i < 64; ++i) lane[i / 32][i % 32] = i / 2 + i % 2 * 32;
        }
    } order;
    const __m512i x = _mm512_castps_si512(a.v), y = _mm512_castps_si512(b.v);
    first = {_mm512_castsi512_ps(_mm512_permutex2var_epi16(x, _mm512_load_si512(order.lane[0]), y))};
    second = {_mm512_castsi512_ps(_mm512_permutex2var_epi16(x, _mm512_load_si512(order.lane[1]), y))};
}
#endif

// Transposes sixteen vectors, `stride` floats apart, in place: in squares of 1, 2, 4 and 8 off the diagonal.
FA_INLINE void transpose_square(float* square, int64_t stride) {
    alignas(64) static constexpr struct Order {
        int32_t low[4][16] = {}, high[4][16] = {};
        constexpr Order() {
            for (int step = 0; step < 4; ++step)
                for (int i = 0; i < 16; ++i) {
                    const bool second = i >> step & 1;
                    low[step][i] = second ? 16 + i - (1 << step) : i;
                    high[step][i] = second ? 16 + i : i + (1 << step);
                }
        }
    } order;
    __m512 rows[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) rows[i] = _mm512_loadu_ps(square + i * stride);
#pragma GCC unroll 4
    for (int step = 0; step < 4; ++step) {
        const __m512i low = _mm512_load_si512(order.low[step]), high = _mm512_load_si512(order.high[step]);
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) {
            if (i >> step & 1) continue;
            const __m512 a = rows[i], b = rows[i + (1 << step)];
            rows[i] = _mm512_permutex2var_ps(a, low, b);
            rows[i + (1 << step)] = _mm512_permutex2var_ps(a, high, b);
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) _mm512_storeu_ps(square + i * stride, rows[i]);
}

// Lane i is from[i / kTimes].
template <int kTimes>
FA_INLINE Vec repeat_each(const float* from) {
    if constexpr (kTimes == 1) return load(from);
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i index = _mm512_srli_epi32(lanes, __builtin_ctz(kTimes));
    return {_mm512_permutexvar_ps(index, load_partial(from, Vec::kWidth / kTimes).v)};
}

// Prefetches into the L2 cache: prefetches into L1 occupy fill buffers that current loads need
// (docs/decisions/0004-prefetch-decode-keys-into-l2.md).
FA_INLINE void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }

}  // namespace FA_NAMESPACE
