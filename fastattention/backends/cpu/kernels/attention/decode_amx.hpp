// Decode of int8 caches on AMX tiles, eight query rows at a time, in the fixed point of FixedPoint split into two planes of
// bytes: word = 256 * high + low. A tile holds both planes of all rows, so that one product serves them:
//
//   scores: 16 keys in place (64 elements each) x the queries, stored in the layout of the second operand
//   values: the probabilities of 64 keys x values of 64 keys, bytes of four keys side by side, 16 columns at a time
#pragma once

namespace FA_NAMESPACE {

struct FixedPointTiles : FixedPoint {
    static constexpr int kChunk = 64;  // elements of a tile's row
    static constexpr int64_t kTileBytes = 1024;
    static constexpr int kRows = 8;
    static constexpr float kLargestWord = 32639.0f;  // 127 * 256 + 127: a plane is a signed byte

    template <int kGroup>
    FA_INLINE void begin() {
        _tile_loadconfig(&kAmxConfig);
    }
    FA_INLINE void end() { _tile_release(); }

    // Tiles of 64 elements: row r has elements 4 r ... 4 r + 3 of the high planes of all queries, then of the low ones.
    template <int kGroup>
    FA_INLINE float store_query(const float* query, int64_t n, float* queries, int g, int64_t) {
        float unit;
        const Vec factor = fixed_point(query, n, largest_of_query(kLargestWord, n), unit);
        auto* planes = reinterpret_cast<int8_t*>(queries) + 4 * g;
        int32_t words[Vec::kWidth];
        for (int64_t i = 0; i < n; i += Vec::kWidth) {
            _mm512_storeu_si512(words, _mm512_cvtps_epi32((load(query + i) * factor).v));
            for (int64_t lane = 0; lane < Vec::kWidth; ++lane) {
                int8_t* to = planes + (i + lane) / 4 * 64 + (i + lane) % 4;
                to[0] = static_cast<int8_t>((words[lane] + 128) >> 8);
                to[4 * kRows] = static_cast<int8_t>(words[lane]);
            }
        }
        return unit;
    }

    // Tiles of 64 keys: eight rows of high planes, eight of low ones. In each half of a tile, key 4 i + l is at 8 l + i,
    // because its eight vectors of four keys are transposed.
    template <int kGroup>
    FA_INLINE void finish_probabilities(float* probabilities, int64_t n, float* units) {
        static_assert(kGroup == kRows, "a tile holds eight queries");
        float factors[Vec::kWidth];
        fixed_point_rows<kGroup>(probabilities, n, kLargestWord, units, factors);
        alignas(64) uint16_t words[kBlockKeys * kRows];
        int64_t i = 0;
        for (; i < n; i += Vec::kWidth) store_words(words + i, round_words(load(probabilities + i) * load(factors)));
        const int64_t end = round_up(n, 64 * kRows);
        memset(words + i, 0, (end - i) * sizeof(uint16_t));
        auto* tiles = reinterpret_cast<int8_t*>(probabilities);
        for (int64_t half = 0; half < end / (32 * kRows); ++half) {
            __m512i rows[kRows];
            transpose_words(words + half * 32 * kRows, rows);
            for (int g = 0; g < kRows; ++g) {
                int8_t* to = tiles + half / 2 * kTileBytes + g * 64 + half % 2 * 32;
                const __m512i high = _mm512_srai_epi16(_mm512_add_epi16(rows[g], _mm512_set1_epi16(128)), 8);
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi16_epi8(high));
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + kRows * 64), _mm512_cvtepi16_epi8(rows[g]));
            }
        }
    }

    // Restores the order of 64 columns from four tiles: tile t has columns 4 t ... 4 t + 3 of each sixteen.
    FA_INLINE void restore_order(const float* from, float* to) {
        for (int lane = 0; lane < 4; ++lane)
            for (int t = 0; t < 4; ++t) memcpy(to + lane * 16 + t * 4, from + t * 16 + lane * 4, 4 * sizeof(float));
    }

    // Joins integers of two keys or columns, high planes in the first half and low ones in the second, to sixteen sums.
    FA_INLINE Vec join_planes(const int32_t* first, const int32_t* second) {
        const __m512i a = _mm512_load_si512(first), b = _mm512_load_si512(second);
        const __m512i high = _mm512_shuffle_i64x2(a, b, 0x44), low = _mm512_shuffle_i64x2(a, b, 0xee);
        return {_mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high, 8), low))};
    }

private:
    // Transposes the 128-bit lanes of eight vectors: rows[g] gets word g of each of 32 keys.
    FA_INLINE void transpose_words(const uint16_t* words, __m512i* rows) {
        __m512i x[8], y[8];
        for (int i = 0; i < 8; ++i) x[i] = _mm512_load_si512(words + i * 32);
        for (int i = 0; i < 4; ++i) {
            y[2 * i] = _mm512_unpacklo_epi16(x[2 * i], x[2 * i + 1]);
            y[2 * i + 1] = _mm512_unpackhi_epi16(x[2 * i], x[2 * i + 1]);
        }
        for (int i = 0; i < 8; i += 4)
            for (int k = 0; k < 2; ++k) {
                x[i + 2 * k] = _mm512_unpacklo_epi32(y[i + k], y[i + k + 2]);
                x[i + 2 * k + 1] = _mm512_unpackhi_epi32(y[i + k], y[i + k + 2]);
            }
        for (int i = 0; i < 4; ++i) {
            rows[2 * i] = _mm512_unpacklo_epi64(x[i], x[i + 4]);
            rows[2 * i + 1] = _mm512_unpackhi_epi64(x[i], x[i + 4]);
        }
    }
};

FA_INLINE __m512i load_bytes(const Int8* p, int64_t n) {
    return n >= 64 ? _mm512_loadu_si512(p) : _mm512_maskz_loadu_epi8((uint64_t{1} << n) - 1, p);
}

// Overload of the template in decode.hpp.
template <int kGroup>
static void score_block(FixedPointTiles, const KeyBlock<Int8>& block, int64_t head, const float* queries, int64_t,
                        int64_t headdim, float* scores) {
    constexpr int kKeys = 16;
    const int64_t chunks = (headdim + 63) / 64;
    const int64_t offset = head * block.keys.head_stride;
    PrefetchCursor<Int8> ahead(block.keys, block, head);
    alignas(64) int8_t keys[2 * kKeys][kMaxHeaddim];
    alignas(64) int32_t sums[2 * kKeys][16];
    for (int64_t j = 0; j < block.n; j += 2 * kKeys) {
        const int64_t n = smaller(2 * kKeys, block.n - j);
        for (int64_t t = 0; t < n; ++t) {
            ahead.prefetch_next(0, headdim);
            const Int8* key = block.keys[j + t] + offset;
            for (int64_t c = 0; c < headdim; c += 64) _mm512_store_si512(keys[t] + c, load_bytes(key + c, headdim - c));
        }
        _tile_zero(0);
        _tile_zero(1);
        for (int64_t c = 0; c < chunks; ++c) {
            _tile_loadd(6, reinterpret_cast<const int8_t*>(queries) + c * FixedPointTiles::kTileBytes, 64);
            _tile_loadd(4, keys[0] + c * 64, kMaxHeaddim);
            _tile_dpbssd(0, 4, 6);
            if (n > kKeys) {
                _tile_loadd(5, keys[kKeys] + c * 64, kMaxHeaddim);
                _tile_dpbssd(1, 5, 6);
            }
        }
        _tile_stored(0, sums[0], 64);
        if (n > kKeys) _tile_stored(1, sums[kKeys], 64);
        for (int64_t t = 0; t < n; t += 2)
            store(scores + (j + t) * kGroup, FixedPointTiles::join_planes(sums[t], sums[t + 1]));
    }
}

// Stores 64 columns of the values of up to 64 keys, starting at `key`, as the four tiles of restore_order. The keys are in
// the order of those of the probabilities.
FA_INLINE void interleave_values(const KeyBlock<Int8>& block, int64_t key, int64_t offset, int64_t columns,
                                 PrefetchCursor<Int8>& ahead, int64_t column, int8_t* tiles) {
    const int64_t n = block.n - key;
    for (int64_t row = 0; row < 16; ++row) {
        const int64_t first = row / 8 * 32 + row % 2 * 16 + row % 8 / 2;
        if (first >= n) continue;  // their probabilities are 0
        for (int64_t i = first; i < smaller(first + 16, n); i += 4) ahead.prefetch_next(column, columns);
        __m512i x[4];
        for (int i = 0; i < 4; ++i) x[i] = load_bytes(block.values[key + smaller(first + 4 * i, n - 1)] + offset, columns);
        const __m512i low[2] = {_mm512_unpacklo_epi8(x[0], x[1]), _mm512_unpacklo_epi8(x[2], x[3])};
        const __m512i high[2] = {_mm512_unpackhi_epi8(x[0], x[1]), _mm512_unpackhi_epi8(x[2], x[3])};
        int8_t* to = tiles + row * 64;
        _mm512_store_si512(to, _mm512_unpacklo_epi16(low[0], low[1]));
        _mm512_store_si512(to + 1 * FixedPointTiles::kTileBytes, _mm512_unpackhi_epi16(low[0], low[1]));
        _mm512_store_si512(to + 2 * FixedPointTiles::kTileBytes, _mm512_unpacklo_epi16(high[0], high[1]));
        _mm512_store_si512(to + 3 * FixedPointTiles::kTileBytes, _mm512_unpackhi_epi16(high[0], high[1]));
    }
}

// Overload of the template in decode.hpp.
template <int kGroup>
static void accumulate_block(FixedPointTiles, const KeyBlock<Int8>& block, int64_t head, const float* probabilities,
                             const float* units, float* acc_o, int64_t acc_stride, int64_t headdim_v) {
    constexpr int64_t kTile = FixedPointTiles::kTileBytes;
    alignas(64) int8_t values[4 * kTile];
    alignas(64) int32_t sums[4][16][16];
    for (int64_t column = 0; column < headdim_v; column += 64) {
        const int64_t columns = smaller(64, headdim_v - column), offset = head * block.values.head_stride + column;
        PrefetchCursor<Int8> ahead(block.values, block, head);
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t key = 0; key < block.n; key += 64) {
            interleave_values(block, key, offset, columns, ahead, column, values);
            _tile_loadd(4, reinterpret_cast<const int8_t*>(probabilities) + key / 64 * kTile, 64);
            _tile_loadd(5, values, 64);
            _tile_dpbssd(0, 4, 5);
            _tile_loadd(6, values + kTile, 64);
            _tile_dpbssd(1, 4, 6);
            _tile_loadd(7, values + 2 * kTile, 64);
            _tile_dpbssd(2, 4, 7);
            _tile_loadd(5, values + 3 * kTile, 64);
            _tile_dpbssd(3, 4, 5);
        }
        _tile_stored(0, sums[0], 64);
        _tile_stored(1, sums[1], 64);
        _tile_stored(2, sums[2], 64);
        _tile_stored(3, sums[3], 64);
        for (int g = 0; g < kGroup; ++g)
            for (int t = 0; t < 4; ++t) {
                const __m512i high = _mm512_load_si512(sums[t][g]), low = _mm512_load_si512(sums[t][g + 8]);
                const Vec sum = integers_to_floats(from_integers(_mm512_add_epi32(_mm512_slli_epi32(high, 8), low)));
                float* to = acc_o + g * acc_stride + column + t * Vec::kWidth;
                store(to, fma(sum, broadcast(units[g]), load(to)));
            }
    }
}

}  // namespace FA_NAMESPACE
