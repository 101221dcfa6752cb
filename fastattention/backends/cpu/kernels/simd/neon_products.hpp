// Products of integers, float16 and bfloat16 in NEON, and the layouts of their operands.
#pragma once

namespace FA_NAMESPACE {

// Vectors of integers, kept as bits in a Vec: four of 32 bits, eight of 16 bits (words), or four quads of 8-bit integers.
// Products are in assembler. GCC would move sums between registers whenever an intrinsic takes them as integers. Intrinsics
// are also not inlined into functions that are compiled for processors without them.
#define FA_HAS_WORDS
#define FA_HAS_QUADS
#ifdef FA_HAS_HALF_DOT
#define FA_ARCH_DOTPROD
#else
#define FA_ARCH_DOTPROD ".arch armv8.2-a+dotprod\n\t"
#endif
FA_INLINE Vec integers_to_floats(Vec a) { return {vcvtq_f32_s32(vreinterpretq_s32_f32(a.v))}; }

FA_INLINE Vec load_words(const Int8* p) {
    return {vreinterpretq_f32_s16(vmovl_s8(vld1_s8(reinterpret_cast<const int8_t*>(p))))};
}
FA_INLINE Vec load_words_partial(const Int8* p, int n) {
    Int8 padded[8] = {};
    memcpy(padded, p, n);
    return load_words(padded);
}
// acc + a[i] * b[i] + a[i + 4] * b[i + 4] in lane i.
FA_INLINE Vec dot_words(Vec acc, Vec a, Vec b) {
    __asm__("smlal %0.4s, %1.4h, %2.4h\n\tsmlal2 %0.4s, %1.8h, %2.8h" : "+&w"(acc.v) : "w"(a.v), "w"(b.v));
    return acc;
}
// Pairs of rows for multiply_word_pairs, whose result has columns in order.
FA_INLINE void pair_words(Vec a, Vec b, Vec& first, Vec& second) { pair_halves(a, b, first, second); }
FA_INLINE void restore_word_columns(Vec a, Vec b, Vec& first, Vec& second) {
    first = a;
    second = b;
}
// acc + words of the first row times the first word of `by` + words of the second row times the second.
FA_INLINE Vec multiply_word_pairs(Vec acc, Vec pairs, Vec by) {
    __asm__("smlal %0.4s, %1.4h, %2.h[0]\n\tsmlal2 %0.4s, %1.8h, %2.h[1]" : "+&w"(acc.v) : "w"(pairs.v), "x"(by.v));
    return acc;
}
FA_INLINE uint16x4_t round_words(Vec a) { return vreinterpret_u16_s16(vqmovn_s32(vcvtnq_s32_f32(a.v))); }
FA_INLINE void store_words(uint16_t* to, uint16x4_t words) { vst1_u16(to, words); }

// Does for integers what reduce_columns does for floats; the result is floats.
FA_INLINE Vec reduce_integer_columns(const Vec* acc) {
    int32x4_t sums[4];
    for (int i = 0; i < 4; ++i) sums[i] = vreinterpretq_s32_f32(acc[i].v);
    return {vcvtq_f32_s32(vpaddq_s32(vpaddq_s32(sums[0], sums[1]), vpaddq_s32(sums[2], sums[3])))};
}

// Sums of products of quads begin with 0: both factors are signed.
static constexpr int kQuadOffset = 0;
// acc + the four products of each quad. Only for processors with FEAT_DotProd.
FA_INLINE Vec dot_quads(Vec acc, Vec a, Vec b) {
    __asm__(FA_ARCH_DOTPROD "sdot %0.4s, %1.16b, %2.16b" : "+w"(acc.v) : "w"(a.v), "w"(b.v));
    return acc;
}
template <int kIndex>
FA_INLINE Vec dot_quads(Vec acc, Lane<kIndex> a, Vec b) {
    __asm__(FA_ARCH_DOTPROD "sdot %0.4s, %1.16b, %2.4b[%3]" : "+w"(acc.v) : "w"(b.v), "w"(a.of.v), "i"(kIndex));
    return acc;
}

// Probabilities of kGroup rows, 16 bits each, key by key, become pairs of neighbouring keys: to[(pair * kGroup + g) * 2 + k]
// is key 2 * pair + k of row g. p: numbers i ... i + 3 in the first order. Calls are in order, as with four rows a pair is
// complete in every second one.
template <int kGroup>
FA_INLINE void store_key_pairs(uint16_t* to, int64_t i, uint16x4_t p) {
    if constexpr (kGroup == 2) p = vuzp1_u16(p, vext_u16(p, p, 1));
    if (kGroup < 4 || i % 8 == 0) return vst1_u16(to + i, p);
    const uint16x4_t before = vld1_u16(to + i - 4);
    vst1q_u16(to + i - 4, vcombine_u16(vzip1_u16(before, p), vzip2_u16(before, p)));
}

#ifdef FA_HAS_HALF_DOT
// acc + products of the first (half = 0) or the last four float16 of both.
FA_INLINE Vec multiply_halves(Vec acc, Vec a, Vec b, int half) {
    const float16x8_t x = vreinterpretq_f16_f32(a.v), y = vreinterpretq_f16_f32(b.v);
    return {half == 0 ? vfmlalq_low_f16(acc.v, x, y) : vfmlalq_high_f16(acc.v, x, y)};
}
// Up to 16 bytes of a row, n of which exist; zeros after them.
FA_INLINE Vec load_quads(const Int8* p, int64_t n) {
    if (n >= 16) return load(reinterpret_cast<const float*>(p));
    if (n == 8) return {vreinterpretq_f32_s8(vcombine_s8(vld1_s8(reinterpret_cast<const int8_t*>(p)), vdup_n_s8(0)))};
    alignas(16) Int8 padded[16] = {};
    memcpy(padded, p, n);
    return load(reinterpret_cast<const float*>(padded));
}
// Sixteen words as two planes of signed bytes: word = 256 * high + low.
FA_INLINE void split_words(const uint16_t* words, Vec& high, Vec& low) {
    const int16x8_t a = vreinterpretq_s16_u16(vld1q_u16(words)), b = vreinterpretq_s16_u16(vld1q_u16(words + 8));
    high = {vreinterpretq_f32_s8(vcombine_s8(vrshrn_n_s16(a, 8), vrshrn_n_s16(b, 8)))};
    low = {vreinterpretq_f32_s8(vcombine_s8(vmovn_s16(a), vmovn_s16(b)))};
}
FA_INLINE Vec join_planes(Vec high, Vec low) {
    return {vreinterpretq_f32_s32(vaddq_s32(vshlq_n_s32(vreinterpretq_s32_f32(high.v), 8), vreinterpretq_s32_f32(low.v)))};
}
// Sixteen bytes of kGroup rows, key by key, become quads of four keys of a row.
template <int kGroup>
FA_INLINE Vec gather_keys(Vec a) {
    alignas(16) static constexpr struct Order {
        uint8_t lane[16] = {};
        constexpr Order() {
            for (int i = 0; i < 16; ++i) lane[i] = (i / (4 * kGroup) * 4 + i % 4) * kGroup + i / 4 % kGroup;
        }
    } order;
    return {vreinterpretq_f32_u8(vqtbl1q_u8(vreinterpretq_u8_f32(a.v), vld1q_u8(order.lane)))};
}
// Four rows of bytes become quads, one column each: the first kQuads vectors of them.
template <int kQuads>
FA_INLINE void interleave_bytes(const Vec* rows, Vec* quads) {
    const uint8x16_t a = vreinterpretq_u8_f32(rows[0].v), b = vreinterpretq_u8_f32(rows[1].v);
    const uint8x16_t c = vreinterpretq_u8_f32(rows[2].v), d = vreinterpretq_u8_f32(rows[3].v);
    const uint16x8_t ab = vreinterpretq_u16_u8(vzip1q_u8(a, b)), cd = vreinterpretq_u16_u8(vzip1q_u8(c, d));
    quads[0] = {vreinterpretq_f32_u16(vzip1q_u16(ab, cd))};
    quads[1] = {vreinterpretq_f32_u16(vzip2q_u16(ab, cd))};
    if constexpr (kQuads == 4) {
        const uint16x8_t ef = vreinterpretq_u16_u8(vzip2q_u8(a, b)), gh = vreinterpretq_u16_u8(vzip2q_u8(c, d));
        quads[2] = {vreinterpretq_f32_u16(vzip1q_u16(ef, gh))};
        quads[3] = {vreinterpretq_f32_u16(vzip2q_u16(ef, gh))};
    }
}
// Pairs that have each number twice.
FA_INLINE Vec twice(uint16x4_t a) { return {vreinterpretq_f32_u16(vcombine_u16(vzip1_u16(a, a), vzip2_u16(a, a)))}; }
#endif

#ifdef FA_HAS_BF16_DOT
// acc + a.even * b.even + a.odd * b.odd over four pairs of bfloat16.
FA_INLINE bfloat16x8_t to_bfloat16s(Vec a) { return vreinterpretq_bf16_f32(a.v); }
FA_INLINE Vec dot_pairs(Vec acc, Vec a, Vec b) { return {vbfdotq_f32(acc.v, to_bfloat16s(a), to_bfloat16s(b))}; }
template <int kIndex>
FA_INLINE Vec dot_pairs(Vec acc, Lane<kIndex> a, Vec b) {
    return {vbfdotq_laneq_f32(acc.v, to_bfloat16s(b), to_bfloat16s(a.of), kIndex)};
}

// Pairs (a[i], b[i]) of two rows of eight elements: the first and the last four.
FA_INLINE Vec interleave_low(Vec a, Vec b) {
    return {vreinterpretq_f32_u16(vzip1q_u16(vreinterpretq_u16_f32(a.v), vreinterpretq_u16_f32(b.v)))};
}
FA_INLINE Vec interleave_high(Vec a, Vec b) {
    return {vreinterpretq_f32_u16(vzip2q_u16(vreinterpretq_u16_f32(a.v), vreinterpretq_u16_f32(b.v)))};
}
// Here they leave columns in order.
FA_INLINE void restore_columns(Vec low, Vec high, Vec& first, Vec& second) {
    first = low;
    second = high;
}
FA_INLINE void interleave_pairs(Vec a, Vec b, Vec& first, Vec& second) {
    first = interleave_low(a, b);
    second = interleave_high(a, b);
}
// Rounds both to bfloat16 and interleaves their lanes as pairs.
FA_INLINE Vec to_pairs(Vec first, Vec second) {
    const uint16x4_t even = to_bits16(first, Bfloat16{}), odd = to_bits16(second, Bfloat16{});
    return {vreinterpretq_f32_u16(vcombine_u16(vzip1_u16(even, odd), vzip2_u16(even, odd)))};
}

// Products of matrices of two rows: a has two rows of a matrix, b two columns of another, and the lanes of acc are the two
// rows of their product. A row or column is four bfloat16, or eight int8.
#define FA_HAS_MATRICES
FA_INLINE Vec multiply_matrices(Vec acc, Vec a, Vec b, Bfloat16) {
    return {vbfmmlaq_f32(acc.v, to_bfloat16s(a), to_bfloat16s(b))};
}
FA_INLINE Vec multiply_matrices(Vec acc, Vec a, Vec b, Int8) {
    __asm__("smmla %0.4s, %1.16b, %2.16b" : "+w"(acc.v) : "w"(a.v), "w"(b.v));
    return acc;
}
// Two floats of each row.
FA_INLINE Vec load_halves(const float* first, const float* second) {
    return {vcombine_f32(vld1_f32(first), vld1_f32(second))};
}
FA_INLINE Vec add_integers(Vec a, Vec b) {
    return {vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(a.v), vreinterpretq_s32_f32(b.v)))};
}
#endif

}  // namespace FA_NAMESPACE
