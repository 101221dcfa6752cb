// Decode of bfloat16 rows on AMX tiles, in blocks of 32 keys:
//
//   scores: 16 keys in place, 32 elements of each, x the queries, with two elements of all queries per row
//   values: the probabilities of 32 keys, a row per query, x values of 32 keys, two keys side by side, 16 columns at a time
//
// Keys and values of a block are 8 KB each at headdim 128. While one is multiplied, two prefetches go on line by line: the
// other one into the L1 cache, for the next product, and data two blocks ahead from memory into the L2 cache. Memory is
// never idle, and never has more requests than a core can have in flight
// (docs/decisions/0008-decode-bfloat16-rows-on-amx-tiles.md; two blocks:
// docs/decisions/0009-fetch-bfloat16-rows-two-blocks-ahead.md).
#pragma once

namespace FA_NAMESPACE {

// Prefetches equally spaced rows, a cache line at a time: those at `near` into the L1 cache, and as many at `far`, at equal
// distances, into the L2 cache.
class RowFetch {
public:
    // bytes: length of a row.
    RowFetch(const char* near, const char* far, int64_t stride, int64_t bytes)
        : at_(near), end_(near + bytes), far_(far - near), stride_(stride), gap_(stride - round_up(bytes, 64)) {}

    __attribute__((always_inline)) void prefetch_line() {
        _mm_prefetch(at_, _MM_HINT_T0);
        _mm_prefetch(at_ + far_, _MM_HINT_T1);
        at_ += 64;
        if (at_ < end_) return;
        at_ += gap_;
        end_ += stride_;
    }

private:
    const char *at_, *end_;
    const int64_t far_, stride_, gap_;
};

struct Bfloat16Tiles : Paired {
    using Grouped = Bfloat16Tiles;
    static constexpr bool kRuns = true;
    static constexpr int64_t kBlock = 32, kAhead = 32, kTurn = 32;
    static constexpr int64_t kFar = 2 * kBlock;  // keys by which prefetching from memory runs ahead in a run
    static constexpr int kUnits = 16;  // pairs of elements or keys in a tile

    // Tiles 0 and 1 hold results, 2 and 3 values, 4 probabilities, 5 keys, 6 queries, 7 scores.
    template <int kGroup>
    FA_INLINE void begin() {
        alignas(64) static constexpr struct {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 4 * kGroup, 4 * kGroup};
            uint8_t rows[16] = {kGroup, kGroup, 16, 16, kGroup, 16, 16, 16};
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

    // Reorders pairs of keys, each with all rows side by side, to rows of 16 pairs, with 0 after the last key.
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

    // Computes the scores of a block of equally spaced keys.
    template <int kGroup>
    FA_INLINE void score_run(const char* keys, int64_t stride, const float* queries, int64_t headdim, float* scores,
                             RowFetch ahead);
    // acc_o += probabilities x a block of equally spaced values.
    template <int kGroup>
    FA_INLINE void accumulate_run(const char* values, int64_t stride, const float* probabilities, float* acc_o,
                                  int64_t acc_stride, int64_t headdim_v, RowFetch ahead);

private:
    // to[i * (kGroup / kCount)] gets every kCount-th element of kCount vectors, starting at element i.
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

// Rows of a block that a tile can load: equally spaced, in whole chunks.
struct TileRows {
    const char* first;
    int64_t stride;  // in bytes
};

FA_INLINE bool equally_spaced(char* const* addresses, int64_t n) {
    const int64_t stride = addresses[1] - addresses[0];
    int64_t differences = 0;
    for (int64_t i = 1; i + 1 < n; ++i) differences |= (addresses[i + 1] - addresses[i]) ^ stride;
    return differences == 0;
}

// The keys in place, if tiles can load them so; otherwise their copy in `copies`.
FA_INLINE TileRows tile_rows(const KeyBlockRows<Bfloat16>& keys, int64_t offset, int64_t headdim, Bfloat16* copies) {
    constexpr int64_t kKeys = Bfloat16Tiles::kBlock, kChunk = Bfloat16Tiles::kChunk;
    if (headdim % kChunk == 0 && equally_spaced(keys.addresses, kKeys))
        return {reinterpret_cast<const char*>(keys[0] + offset), keys.addresses[1] - keys.addresses[0]};
    const int64_t stride = round_up(headdim, kChunk);
    for (int64_t j = 0; j < kKeys; ++j)
        for (int64_t c = 0; c < headdim; c += kChunk)
            store(reinterpret_cast<float*>(copies + j * stride + c),
                  load_pairs_partial(keys[j] + offset + c, static_cast<int>(smaller(headdim - c, kChunk))));
    return {reinterpret_cast<const char*>(copies), stride * static_cast<int64_t>(sizeof(Bfloat16))};
}

// Passes the number of chunks of a row to `use`. It is constant for the most common headdim, so that loops are unrolled.
template <class Use>
FA_INLINE void with_chunks(int64_t headdim, Use&& use) {
    if (headdim == 128) {
        use([] { return int64_t{4}; });
    } else {
        use([headdim] { return (headdim + Bfloat16Tiles::kChunk - 1) / Bfloat16Tiles::kChunk; });
    }
}

// scores = keys x queries, for 32 equally spaced keys, while 32 rows are prefetched.
template <int kGroup, class Chunks, class Fetch>
FA_INLINE void score_keys(TileRows keys, const float* queries, Chunks chunks, Fetch& ahead, float* scores) {
    constexpr int64_t kUnits = Bfloat16Tiles::kUnits;
    for (int64_t half = 0; half < 2; ++half) {
        _tile_zero(7);
        for (int64_t c = 0; c < chunks(); ++c) {
#pragma GCC unroll 16
            for (int64_t line = 0; line < kUnits; ++line) ahead.prefetch_line();
            _tile_loadd(6, queries + c * kUnits * kGroup, 4 * kGroup);
            _tile_loadd(5, keys.first + half * kUnits * keys.stride + c * 64, keys.stride);
            _tile_dpbf16ps(7, 5, 6);
        }
        _tile_stored(7, scores + half * kUnits * kGroup, 4 * kGroup);
    }
}

// Overload of the template in decode.hpp. It scores all 32 keys: rows after the last key repeat it.
template <int kGroup>
static void score_block(Bfloat16Tiles, const KeyBlock<Bfloat16>& block, int64_t head, const float* queries, int64_t,
                        int64_t headdim, float* scores) {
    alignas(64) Bfloat16 copies[Bfloat16Tiles::kBlock * kMaxHeaddim];
    const TileRows keys = tile_rows(block.keys, head * block.keys.head_stride, headdim, copies);
    PrefetchCursor<Bfloat16> ahead = block.heads > 1 ? PrefetchCursor<Bfloat16>(block.keys, block, head)
                                                     : PrefetchCursor<Bfloat16>(block.values, block, head, 0);
    with_chunks(headdim, [&](auto chunks)
                             __attribute__((always_inline)) { score_keys<kGroup>(keys, queries, chunks, ahead, scores); });
}

template <int kGroup>
__attribute__((always_inline)) inline void Bfloat16Tiles::score_run(const char* keys, int64_t stride, const float* queries,
                                                                    int64_t headdim, float* scores, RowFetch ahead) {
    with_chunks(headdim, [&](auto chunks) __attribute__((always_inline)) {
        score_keys<kGroup>({keys, stride}, queries, chunks, ahead, scores);
    });
}

// acc_o += probabilities (in tile 4) x values of 32 keys, for up to 32 columns. row(j): the values of key j.
template <bool kPartial, class Row, class Fetch>
FA_INLINE void accumulate_chunk(Row&& row, int columns, float* acc_o, int64_t acc_stride, Fetch& ahead) {
    constexpr int64_t kTile = Bfloat16Tiles::kUnits * Vec::kWidth;
    alignas(64) float tiles[2 * kTile];
#pragma GCC unroll 16
    for (int64_t j = 0; j < Bfloat16Tiles::kBlock; j += 2) {
        ahead.prefetch_line();
        ahead.prefetch_line();
        const Vec a = kPartial ? load_pairs_partial(row(j), columns) : load_pairs(row(j));
        const Vec b = kPartial ? load_pairs_partial(row(j + 1), columns) : load_pairs(row(j + 1));
        store(tiles + j / 2 * Vec::kWidth, interleave_low(a, b));
        store(tiles + kTile + j / 2 * Vec::kWidth, interleave_high(a, b));
    }
    _tile_loadd(0, acc_o, acc_stride * 4);
    _tile_loadd(1, acc_o + Vec::kWidth, acc_stride * 4);
    _tile_loadd(2, tiles, 64);
    _tile_dpbf16ps(0, 4, 2);
    _tile_loadd(3, tiles + kTile, 64);
    _tile_dpbf16ps(1, 4, 3);
    _tile_stored(0, acc_o, acc_stride * 4);
    _tile_stored(1, acc_o + Vec::kWidth, acc_stride * 4);
}

// acc_o += probabilities x values of 32 keys, while 32 rows are prefetched, two lines for every two loaded: memory is never
// idle, and never has more requests than it can serve. row(j): the values of key j.
template <class Row, class Fetch>
FA_INLINE void accumulate_values(Row&& row, const float* probabilities, float* acc_o, int64_t acc_stride, int64_t headdim_v,
                                 Fetch& ahead) {
    constexpr int64_t kChunk = Bfloat16Tiles::kChunk;
    _tile_loadd(4, probabilities, 64);
    int64_t column = 0;
    auto chunk = [&](int64_t j) __attribute__((always_inline)) { return row(j) + column; };
    for (; column + kChunk <= headdim_v; column += kChunk)
        accumulate_chunk<false>(chunk, kChunk, acc_o + column, acc_stride, ahead);
    if (column < headdim_v)
        accumulate_chunk<true>(chunk, static_cast<int>(headdim_v - column), acc_o + column, acc_stride, ahead);
}

// Overload of the template in decode.hpp.
template <int kGroup>
static void accumulate_block(Bfloat16Tiles, const KeyBlock<Bfloat16>& block, int64_t head, const float* probabilities,
                             const float*, float* acc_o, int64_t acc_stride, int64_t headdim_v) {
    PrefetchCursor<Bfloat16> ahead = block.heads > 1 ? PrefetchCursor<Bfloat16>(block.values, block, head)
                                                     : PrefetchCursor<Bfloat16>(block.keys, block, head, block.size);
    const int64_t offset = head * block.values.head_stride;
    auto row = [&](int64_t j) __attribute__((always_inline)) { return block.values[j] + offset; };
    accumulate_values(row, probabilities, acc_o, acc_stride, headdim_v, ahead);
}

template <int kGroup>
__attribute__((always_inline)) inline void Bfloat16Tiles::accumulate_run(const char* values, int64_t stride,
                                                                         const float* probabilities, float* acc_o,
                                                                         int64_t acc_stride, int64_t headdim_v,
                                                                         RowFetch ahead) {
    auto row = [&](int64_t j)
                   __attribute__((always_inline)) { return reinterpret_cast<const Bfloat16*>(values + j * stride); };
    accumulate_values(row, probabilities, acc_o, acc_stride, headdim_v, ahead);
}

}  // namespace FA_NAMESPACE
