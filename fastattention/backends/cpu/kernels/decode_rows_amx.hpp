// Decode of bfloat16 rows on AMX tiles, 32 keys a block:
//
//   scores: 16 keys where they lie, 32 elements of each, x the queries, two elements of all of them in a row
//   values: the probabilities of 32 keys, a row each query, x values of 32 keys, two keys side by side, 16 columns at a time
//
// Keys and values of a block are 8 KB each at headdim 128, and each is fetched while the other is multiplied: memory is never
// idle, and read in two runs that take short turns (docs/experiments.md).
#pragma once

namespace FA_NAMESPACE {

struct Bfloat16Tiles : Paired {
    using Grouped = Bfloat16Tiles;
    static constexpr int64_t kBlock = 32, kAhead = 32, kTurn = 32;
    static constexpr int kUnits = 16;  // pairs of elements or keys in a tile

    // Results of values in tiles 0 and 1, probabilities in 2, keys or values in 3 and 4, queries in 5, scores in 6 and 7.
    template <int kGroup>
    FA_INLINE void begin() {
        alignas(64) static constexpr struct {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 4 * kGroup, 4 * kGroup, 4 * kGroup};
            uint8_t rows[16] = {kGroup, kGroup, kGroup, 16, 16, 16, 16, 16};
        } config;
        _tile_loadconfig(&config);
    }
    FA_INLINE void end() { _tile_release(); }

    template <int kGroup>
    FA_INLINE float store_query(const float* query, int64_t n, float* queries, int g, int64_t) {
        alignas(64) Bfloat16 row[kMaxHeaddim];
        narrow_row(query, row, n);
        for (int64_t i = 0; i < n; i += 2) memcpy(queries + i / 2 * kGroup + g, row + i, sizeof(float));
        return 1.0f;
    }

    // From pairs of keys, the rows of a pair side by side, to rows of 16 pairs; 0 past the last key.
    template <int kGroup>
    FA_INLINE void finish_probabilities(float* probabilities, int64_t n, float*) {
        constexpr int64_t kSize = kBlock * kGroup;
        if (n < kSize) memset(reinterpret_cast<uint16_t*>(probabilities) + n, 0, (kSize - n) * sizeof(uint16_t));
        Vec from[kGroup], to[kGroup];
#pragma GCC unroll 8
        for (int i = 0; i < kGroup; ++i) from[i] = load(probabilities + i * kUnits);
        separate<kGroup, kGroup>(from, to);
#pragma GCC unroll 8
        for (int g = 0; g < kGroup; ++g) store(probabilities + g * kUnits, to[g]);
    }

private:
    // to[i * (kGroup / kCount)]: every kCount-th number of kCount vectors, from number i on.
    template <int kGroup, int kCount>
    FA_INLINE void separate(const Vec* from, Vec* to) {
        if constexpr (kCount == 1) {
            to[0] = from[0];
        } else {
            const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
            const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
            Vec halves[2][kCount / 2];
#pragma GCC unroll 4
            for (int i = 0; i < kCount / 2; ++i) {
                halves[0][i].v = _mm512_permutex2var_ps(from[2 * i].v, even, from[2 * i + 1].v);
                halves[1][i].v = _mm512_permutex2var_ps(from[2 * i].v, odd, from[2 * i + 1].v);
            }
            separate<kGroup, kCount / 2>(halves[0], to);
            separate<kGroup, kCount / 2>(halves[1], to + kGroup / kCount);
        }
    }
};

// Rows of a block as a tile takes them: equally spaced, in whole chunks.
struct TileRows {
    const Bfloat16* first;
    int64_t stride;  // in bytes
};

FA_INLINE bool equally_spaced(char* const* addresses, int64_t n) {
    const int64_t stride = addresses[1] - addresses[0];
    int64_t differences = 0;
    for (int64_t i = 1; i + 1 < n; ++i) differences |= (addresses[i + 1] - addresses[i]) ^ stride;
    return differences == 0;
}

// The keys where they lie if tiles can take them so, else their copy in `copies`.
FA_INLINE TileRows tile_rows(const BlockRows<Bfloat16>& keys, int64_t offset, int64_t headdim, Bfloat16* copies) {
    constexpr int64_t kKeys = Bfloat16Tiles::kBlock, kChunk = Bfloat16Tiles::kChunk;
    if (headdim % kChunk == 0 && equally_spaced(keys.addresses, kKeys))
        return {keys[0] + offset, keys.addresses[1] - keys.addresses[0]};
    const int64_t stride = round_up(headdim, kChunk);
    for (int64_t j = 0; j < kKeys; ++j)
        for (int64_t c = 0; c < headdim; c += kChunk)
            store(reinterpret_cast<float*>(copies + j * stride + c),
                  load_pairs_partial(keys[j] + offset + c, static_cast<int>(smaller(headdim - c, kChunk))));
    return {copies, stride * static_cast<int64_t>(sizeof(Bfloat16))};
}

// Chunks of a row: known to the compiler for the commonest headdim, so that its loops are unrolled.
template <class Use>
FA_INLINE void with_chunks(int64_t headdim, Use&& use) {
    if (headdim == 128) {
        use([] { return int64_t{4}; });
    } else {
        use([headdim] { return (headdim + Bfloat16Tiles::kChunk - 1) / Bfloat16Tiles::kChunk; });
    }
}

// As the template of decode.hpp. All 32 keys: past the last one rows repeat it.
template <int kGroup>
static void score_block(Bfloat16Tiles, const Block<Bfloat16>& block, int64_t head, const float* queries, int64_t,
                        int64_t headdim, float* scores) {
    constexpr int64_t kKeys = Bfloat16Tiles::kBlock, kChunk = Bfloat16Tiles::kChunk;
    alignas(64) Bfloat16 copies[kKeys * kMaxHeaddim];
    const TileRows keys = tile_rows(block.keys, head * block.keys.head_stride, headdim, copies);
    const Bfloat16* const below = keys.first + kKeys / 2 * (keys.stride / static_cast<int64_t>(sizeof(Bfloat16)));
    PrefetchCursor<Bfloat16> ahead = block.heads > 1 ? PrefetchCursor<Bfloat16>(block.keys, block, head)
                                                     : PrefetchCursor<Bfloat16>(block.values, block, head, 0);
    _tile_zero(6);
    _tile_zero(7);
    with_chunks(headdim, [&](auto chunks) __attribute__((always_inline)) {
        int64_t fetched = 0;
        auto fetch_until = [&](int64_t tile) __attribute__((always_inline)) {
            for (; fetched < tile * kKeys / (2 * chunks()); ++fetched) ahead.prefetch_next();
        };
        for (int64_t c = 0; c < chunks(); ++c) {
            fetch_until(2 * c + 1);
            _tile_loadd(5, queries + c * Bfloat16Tiles::kUnits * kGroup, 4 * kGroup);
            _tile_loadd(3, keys.first + c * kChunk, keys.stride);
            _tile_dpbf16ps(6, 3, 5);
            fetch_until(2 * c + 2);
            _tile_loadd(4, below + c * kChunk, keys.stride);
            _tile_dpbf16ps(7, 4, 5);
        }
    });
    _tile_stored(6, scores, 4 * kGroup);
    _tile_stored(7, scores + kKeys / 2 * kGroup, 4 * kGroup);
}

// Values of 32 keys, `columns` of them, as two tiles for every 32 columns.
template <bool kPartial, class Chunks, class Prefetch>
FA_INLINE void interleave_values(const Block<Bfloat16>& block, int64_t offset, int64_t columns, Chunks chunks,
                                 Prefetch&& prefetch_next, float* tiles) {
    constexpr int64_t kChunk = Bfloat16Tiles::kChunk, kTile = Bfloat16Tiles::kUnits * Vec::kWidth;
    for (int64_t j = 0; j < Bfloat16Tiles::kBlock; j += 2) {
        prefetch_next();
        prefetch_next();
        const Bfloat16 *first = block.values[j] + offset, *second = block.values[j + 1] + offset;
        float* const to = tiles + j / 2 * Vec::kWidth;
        for (int64_t c = 0; c < chunks(); ++c) {
            const int n = static_cast<int>(smaller(columns - c * kChunk, kChunk));
            const Vec a = kPartial ? load_pairs_partial(first + c * kChunk, n) : load_pairs(first + c * kChunk);
            const Vec b = kPartial ? load_pairs_partial(second + c * kChunk, n) : load_pairs(second + c * kChunk);
            store(to + 2 * c * kTile, interleave_low(a, b));
            store(to + (2 * c + 1) * kTile, interleave_high(a, b));
        }
    }
}

// acc_o += probabilities x values, of as many columns as there are tiles.
template <class Chunks>
FA_INLINE void multiply_values(const float* tiles, Chunks chunks, float* acc_o, int64_t acc_stride) {
    constexpr int64_t kTile = Bfloat16Tiles::kUnits * Vec::kWidth;
    for (int64_t c = 0; c < chunks(); ++c, acc_o += 2 * Vec::kWidth, tiles += 2 * kTile) {
        _tile_loadd(0, acc_o, acc_stride * 4);
        _tile_loadd(1, acc_o + Vec::kWidth, acc_stride * 4);
        _tile_loadd(3, tiles, 64);
        _tile_dpbf16ps(0, 2, 3);
        _tile_loadd(4, tiles + kTile, 64);
        _tile_dpbf16ps(1, 2, 4);
        _tile_stored(0, acc_o, acc_stride * 4);
        _tile_stored(1, acc_o + Vec::kWidth, acc_stride * 4);
    }
}

// As the template of decode.hpp.
template <int kGroup>
static void accumulate_block(Bfloat16Tiles, const Block<Bfloat16>& block, int64_t head, const float* probabilities,
                             const float*, float* acc_o, int64_t acc_stride, int64_t headdim_v) {
    constexpr int64_t kColumns = 128;  // at a time: 8 KB of tiles stay in the first-level cache
    alignas(64) float tiles[kColumns * Bfloat16Tiles::kUnits];
    PrefetchCursor<Bfloat16> ahead = block.heads > 1 ? PrefetchCursor<Bfloat16>(block.values, block, head)
                                                     : PrefetchCursor<Bfloat16>(block.keys, block, head, block.size);
    _tile_loadd(2, probabilities, 64);
    for (int64_t column = 0; column < headdim_v; column += kColumns) {
        const int64_t columns = smaller(kColumns, headdim_v - column), offset = head * block.values.head_stride + column;
        auto prefetch_next = [&]() __attribute__((always_inline)) {
            if (column == 0) ahead.prefetch_next();
        };
        with_chunks(columns, [&](auto chunks) __attribute__((always_inline)) {
            if (columns % Bfloat16Tiles::kChunk == 0) {
                interleave_values<false>(block, offset, columns, chunks, prefetch_next, tiles);
            } else {
                interleave_values<true>(block, offset, columns, chunks, prefetch_next, tiles);
            }
            multiply_values(tiles, chunks, acc_o + column, acc_stride);
        });
    }
}

}  // namespace FA_NAMESPACE
