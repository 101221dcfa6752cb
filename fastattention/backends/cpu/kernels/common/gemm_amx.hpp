// The matrix product on AMX: tiles of 16 rows by 64 bytes, in the same interleaved layout as vectors of pairs and quads.
#pragma once

namespace FA_NAMESPACE {

static constexpr int kAmxTile = 16;  // rows of a tile, units of its depth, columns of its result

// All eight tile registers have 16 rows of 64 bytes. This is a constant because the intrinsic declares only eight of the
// bytes that it reads: stores to a local variable would be dropped.
alignas(64) static const struct {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
} kAmxConfig;

template <int kElementsOfUnit>
struct AmxUnit {
    static constexpr int kElements = kElementsOfUnit;
    static constexpr int kOffset = 0;
    static constexpr int kRowStep = kAmxTile;
    static constexpr int kDepthStep = kAmxTile;
    using Stored = float;
    static constexpr int kOperands = 1;
    FA_INLINE void load_units(const Stored* p, Vec* operands) { operands[0] = load(p); }
    FA_INLINE Vec pack(Vec first, Vec second) { return to_pairs(first, second); }

    FA_INLINE void begin() { _tile_loadconfig(&kAmxConfig); }
    FA_INLINE void end() { _tile_release(); }
};
using AmxPair = AmxUnit<2>;
using AmxQuad = AmxUnit<4>;
template <int kElements>
constexpr bool kMultipliesTiles<AmxUnit<kElements>> = true;

// Tile c += tile a times tile b. The instructions take register numbers as literals, which only a macro can pass on.
#define FA_TILE_DOT(c, a, b)                                   \
    if constexpr (Unit::kElements == 4) _tile_dpbssd(c, a, b); \
    else _tile_dpbf16ps(c, a, b)

// Adds products to two by two tiles of C, or fewer at the edges. Registers 0 to 3 hold C, 4 and 5 hold A, 6 and 7 hold B.
template <class Unit, bool kTwoRows, bool kTwoColumns, class Fetch>
FA_INLINE void accumulate_tiles(const float* a, int64_t a_stride, const float* b, int64_t b_stride, int64_t depth,
                                Fetch ahead) {
    const int64_t a_bytes = a_stride * 4, b_bytes = b_stride * 4;
    // The intrinsics do not say that they read memory.
    __asm__ volatile("" ::: "memory");
    for (int64_t k = 0; k < depth; k += kAmxTile) {
        ahead.fetch(b + k * b_stride, b_bytes);
        _tile_loadd(4, a + k, a_bytes);
        _tile_loadd(6, b + k * b_stride, b_bytes);
        FA_TILE_DOT(0, 4, 6);
        if constexpr (kTwoColumns) {
            _tile_loadd(7, b + k * b_stride + kAmxTile, b_bytes);
            FA_TILE_DOT(1, 4, 7);
        }
        if constexpr (kTwoRows) {
            _tile_loadd(5, a + kAmxTile * a_stride + k, a_bytes);
            FA_TILE_DOT(2, 5, 6);
            if constexpr (kTwoColumns) {
                FA_TILE_DOT(3, 5, 7);
            }
        }
    }
}

FA_INLINE void clear_tiles() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

template <bool kTwoRows, bool kTwoColumns>
FA_INLINE void load_tiles(const float* c, int64_t c_stride) {
    const int64_t c_bytes = c_stride * 4;
    const float* const c_below = c + kAmxTile * c_stride;
    __asm__ volatile("" ::: "memory");  // as in accumulate_tiles
    _tile_loadd(0, c, c_bytes);
    if constexpr (kTwoColumns) _tile_loadd(1, c + kAmxTile, c_bytes);
    if constexpr (kTwoRows) _tile_loadd(2, c_below, c_bytes);
    if constexpr (kTwoRows && kTwoColumns) _tile_loadd(3, c_below + kAmxTile, c_bytes);
}

template <bool kTwoRows, bool kTwoColumns>
FA_INLINE void store_tiles(float* c, int64_t c_stride) {
    const int64_t c_bytes = c_stride * 4;
    float* const c_below = c + kAmxTile * c_stride;
    _tile_stored(0, c, c_bytes);
    if constexpr (kTwoColumns) _tile_stored(1, c + kAmxTile, c_bytes);
    if constexpr (kTwoRows) _tile_stored(2, c_below, c_bytes);
    if constexpr (kTwoRows && kTwoColumns) _tile_stored(3, c_below + kAmxTile, c_bytes);
}

// Leaves the product with two tiles of columns in registers, for store_tiles.
template <class Unit, bool kTwoRows>
FA_INLINE void multiply_tiles(const float* a, int64_t a_stride, const float* b, int64_t b_stride, int64_t depth) {
    clear_tiles();
    accumulate_tiles<Unit, kTwoRows, true>(a, a_stride, b, b_stride, depth, FetchNothing{});
}

template <class Unit, bool kTwoRows, bool kTwoColumns, bool kAccumulate, class Fetch>
FA_INLINE void multiply_amx(const float* a, int64_t a_stride, const float* b, int64_t b_stride, int64_t depth, float* c,
                            int64_t c_stride, Fetch ahead) {
    if constexpr (kAccumulate) {
        load_tiles<kTwoRows, kTwoColumns>(c, c_stride);
    } else {
        clear_tiles();
    }
    accumulate_tiles<Unit, kTwoRows, kTwoColumns>(a, a_stride, b, b_stride, depth, ahead);
    store_tiles<kTwoRows, kTwoColumns>(c, c_stride);
}

template <class Unit, bool kTwoRows, bool kAccumulate, class Fetch>
FA_INLINE void multiply_amx_columns(const float* a, int64_t a_stride, const float* b, int64_t b_stride, int64_t depth,
                                    float* c, int64_t c_stride, int64_t columns, Fetch ahead) {
    int64_t j = 0;
    for (; j + 2 * kAmxTile <= columns; j += 2 * kAmxTile)
        multiply_amx<Unit, kTwoRows, true, kAccumulate>(a, a_stride, b + j, b_stride, depth, c + j, c_stride, ahead);
    if (j < columns)
        multiply_amx<Unit, kTwoRows, false, kAccumulate>(a, a_stride, b + j, b_stride, depth, c + j, c_stride, ahead);
}

// Rows come one pair of tiles after the other, which the L1 cache keeps for all columns.
template <bool kAccumulate, int kElements, class Fetch = FetchNothing>
static void multiply_panel(AmxUnit<kElements>, const float* a, int64_t a_stride, const float* b, int64_t b_stride,
                           int64_t depth, float* c, int64_t c_stride, int64_t rows, int64_t columns, Fetch ahead = {}) {
    using Unit = AmxUnit<kElements>;
    int64_t i = 0;
    for (; i + 2 * kAmxTile <= rows; i += 2 * kAmxTile)
        multiply_amx_columns<Unit, true, kAccumulate>(a + i * a_stride, a_stride, b, b_stride, depth, c + i * c_stride,
                                                      c_stride, columns, ahead);
    if (i < rows)
        multiply_amx_columns<Unit, false, kAccumulate>(a + i * a_stride, a_stride, b, b_stride, depth, c + i * c_stride,
                                                       c_stride, columns, ahead);
}

#undef FA_TILE_DOT

}  // namespace FA_NAMESPACE
