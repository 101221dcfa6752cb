// Decode of int8 caches by dot products of bytes, in the fixed point of FixedPoint split into two planes of signed bytes:
// word = 256 * high + low. Each plane has sums of its own, of four elements of a key, or of four keys in a column.
#pragma once

namespace FA_NAMESPACE {

struct BytePlanes : FixedPoint {
    using Grouped = BytePlanes;
    static constexpr int kChunk = 4 * Vec::kWidth;
    static constexpr int kColumnStep = kChunk;
    static constexpr float kLargestWord = 32639.0f;  // 127 * 256 + 127

    // Both planes of a chunk are side by side.
    template <int kGroup>
    FA_INLINE float store_query(const float* query, int64_t n, float* queries, int g, int64_t stride) {
        float unit;
        const Vec factor = fixed_point(query, n, largest_of_query(kLargestWord, n), unit);
        uint16_t words[kMaxHeaddim + kChunk];
        for (int64_t i = 0; i < n; i += Vec::kWidth) store_words(words + i, round_words(load(query + i) * factor));
        float* to = queries + g * stride;
        for (int64_t i = 0; i < n; i += kChunk, to += 2 * Vec::kWidth) {
            Vec high, low;
            split_words(words + i, high, low);
            store(to, high);
            store(to + Vec::kWidth, low);
        }
        return unit;
    }

    // Probabilities of four keys become a quad for each plane: first those of row 0, then those of row 1. Works in place.
    template <int kGroup>
    FA_INLINE void finish_probabilities(float* probabilities, int64_t n, float* units) {
        float factors[Vec::kWidth];
        fixed_point_rows<kGroup>(probabilities, n, kLargestWord, units, factors);
        uint16_t words[kBlockKeys * kMaxGroup + kChunk];
        for (int64_t i = 0; i < n; i += Vec::kWidth)
            store_words(words + i, round_words(load(probabilities + i) * load(factors)));
        memset(words + n, 0, kChunk * sizeof(uint16_t));
        for (int64_t i = 0; i < n; i += kChunk) {
            Vec high, low;
            split_words(words + i, high, low);
            store_interleaved(probabilities + i / 2, gather_keys<kGroup>(high), gather_keys<kGroup>(low));
        }
    }

    FA_INLINE void restore_order(const float* from, float* to) { memcpy(to, from, kChunk * sizeof(float)); }
};

template <int kGroup>
static void score_block(BytePlanes, const KeyBlock<Int8>& block, int64_t head, const float* queries, int64_t query_stride,
                        int64_t headdim, float* scores) {
    constexpr int kKeys = 8 / kGroup, kChunk = BytePlanes::kChunk;
    const int64_t offset = head * block.keys.head_stride;
    PrefetchCursor<Int8> ahead(block.keys, block, head);
    for (int64_t j = 0; j < block.n; j += kKeys) {
        Vec high[kKeys * kGroup], low[kKeys * kGroup];
#pragma GCC unroll 8
        for (int i = 0; i < kKeys * kGroup; ++i) high[i] = low[i] = zero();
#pragma GCC unroll 8
        for (int t = 0; t < kKeys; ++t) ahead.prefetch_next(0, headdim);
        auto step = [&](int64_t c, int64_t n) __attribute__((always_inline)) {
            Vec keys[kKeys];
#pragma GCC unroll 8
            for (int t = 0; t < kKeys; ++t) keys[t] = load_quads(block.keys[j + t] + offset + c, n);
#pragma GCC unroll 4
            for (int g = 0; g < kGroup; ++g) {
                const Vec high_plane = load(queries + g * query_stride + c / 2);
                const Vec low_plane = load(queries + g * query_stride + c / 2 + Vec::kWidth);
#pragma GCC unroll 8
                for (int t = 0; t < kKeys; ++t) {
                    high[t * kGroup + g] = dot_quads(high[t * kGroup + g], keys[t], high_plane);
                    low[t * kGroup + g] = dot_quads(low[t * kGroup + g], keys[t], low_plane);
                }
            }
        };
        int64_t c = 0;
        for (; c + kChunk <= headdim; c += kChunk) step(c, kChunk);
        if (c < headdim) step(c, headdim - c);
#pragma GCC unroll 8
        for (int i = 0; i < kKeys * kGroup; ++i) high[i] = join_planes(high[i], low[i]);
        for (int i = 0; i < kKeys * kGroup; i += Vec::kWidth)
            store(scores + j * kGroup + i, reduce_integer_columns(high + i));
    }
}

// Adds the lanes from kLane on of the planes of four keys' probabilities, times the values of the same keys.
template <int kGroup, int kQuads, int kLane = 0>
FA_INLINE void multiply_planes(const Vec* planes, const Vec* values, Vec (*acc)[2][kQuads]) {
    if constexpr (kLane < 2 * kGroup) {
#pragma GCC unroll 4
        for (int i = 0; i < kQuads; ++i) {
            Vec& sum = acc[kLane / 2][kLane % 2][i];
            sum = dot_quads(sum, Lane<kLane % Vec::kWidth>{planes[kLane / Vec::kWidth]}, values[i]);
        }
        multiply_planes<kGroup, kQuads, kLane + 1>(planes, values, acc);
    }
}

// Accumulates kQuads vectors of columns, of which the values have `columns`.
template <int kGroup, int kQuads>
FA_INLINE void accumulate_bytes(const KeyBlock<Int8>& block, int64_t head, const float* probabilities, const float* units,
                                float* acc_o, int64_t acc_stride, int64_t column, int64_t columns) {
    Vec acc[kGroup][2][kQuads];
#pragma GCC unroll 16
    for (int i = 0; i < kGroup * 2 * kQuads; ++i) acc[i / (2 * kQuads)][i / kQuads % 2][i % kQuads] = zero();
    const int64_t offset = head * block.values.head_stride + column;
    PrefetchCursor<Int8> ahead(block.values, block, head);
    for (int64_t j = 0; j < block.n; j += 4) {
        Vec rows[4], values[kQuads], planes[(2 * kGroup + Vec::kWidth - 1) / Vec::kWidth];
#pragma GCC unroll 4
        for (int t = 0; t < 4; ++t) {
            ahead.prefetch_next(column, columns);
            rows[t] = load_quads(block.values[j + t] + offset, columns);
        }
        interleave_bytes<kQuads>(rows, values);
#pragma GCC unroll 2
        for (int i = 0; i < 2 * kGroup; i += Vec::kWidth) planes[i / Vec::kWidth] = load(probabilities + j / 2 * kGroup + i);
        multiply_planes<kGroup>(planes, values, acc);
    }
#pragma GCC unroll 4
    for (int g = 0; g < kGroup; ++g)
#pragma GCC unroll 4
        for (int i = 0; i < kQuads; ++i) {
            float* to = acc_o + g * acc_stride + column + i * Vec::kWidth;
            const Vec sum = integers_to_floats(join_planes(acc[g][0][i], acc[g][1][i]));
            store(to, fma(sum, broadcast(units[g]), load(to)));
        }
}

template <int kGroup>
static void accumulate_block(BytePlanes, const KeyBlock<Int8>& block, int64_t head, const float* probabilities,
                             const float* units, float* acc_o, int64_t acc_stride, int64_t headdim_v) {
    constexpr int kQuads = kGroup == 4 ? 2 : 4;  // sums of both planes fill half the registers
    constexpr int64_t kColumns = kQuads * Vec::kWidth;
    int64_t column = 0;
    for (; column + kColumns <= headdim_v; column += kColumns)
        accumulate_bytes<kGroup, kQuads>(block, head, probabilities, units, acc_o, acc_stride, column, kColumns);
    if (column < headdim_v)
        accumulate_bytes<kGroup, kQuads>(block, head, probabilities, units, acc_o, acc_stride, column, headdim_v - column);
}

}  // namespace FA_NAMESPACE
