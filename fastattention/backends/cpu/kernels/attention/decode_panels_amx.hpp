// The products of decode_panels.hpp for few rows on AMX tiles. Tiles of A and C have only as many rows as there are queries.
// If the last units of a key do not fill a tile, they have smaller tiles.
#pragma once

namespace FA_NAMESPACE {

template <>
struct FewRows<AmxPair> {
    static constexpr int64_t kMostRows = kAmxTile;

    // Tiles 0 and 1 hold C, 2 holds A, 3 and 4 hold B. For the last units of a key, 5 holds A, 6 and 7 hold B.
    static void begin(int64_t rows, int64_t key_units) {
        alignas(64) struct {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t rows[16] = {0, 0, 0, 16, 16, 0, 0, 0};
        } config;
        const int64_t left = key_units % kAmxTile == 0 ? kAmxTile : key_units % kAmxTile;
        config.rows[0] = config.rows[1] = config.rows[2] = config.rows[5] = static_cast<uint8_t>(rows);
        config.bytes_per_row[5] = static_cast<uint16_t>(left * 4);
        config.rows[6] = config.rows[7] = static_cast<uint8_t>(left);
        // The intrinsic declares only eight of the bytes that it reads.
        asm volatile("" : : "r"(&config) : "memory");
        _tile_loadconfig(&config);
    }
};

// Multiplies two tiles of columns, or the last one.
template <bool kTwoColumns>
FA_INLINE void multiply_amx_few(const float* a, int64_t a_stride, const float* b, int64_t b_stride, int64_t depth, float* c,
                                int64_t c_stride, FetchAhead ahead) {
    const int64_t a_bytes = a_stride * 4, b_bytes = b_stride * 4, c_bytes = c_stride * 4;
    _tile_loadd(0, c, c_bytes);
    if constexpr (kTwoColumns) _tile_loadd(1, c + kAmxTile, c_bytes);
    int64_t k = 0;
    for (; k + kAmxTile <= depth; k += kAmxTile) {
        for (int64_t row = k; row < k + kAmxTile; ++row) ahead.fetch(b + row * b_stride, kTwoColumns ? 128 : 64);
        _tile_loadd(2, a + k, a_bytes);
        _tile_loadd(3, b + k * b_stride, b_bytes);
        _tile_dpbf16ps(0, 2, 3);
        if constexpr (kTwoColumns) {
            _tile_loadd(4, b + k * b_stride + kAmxTile, b_bytes);
            _tile_dpbf16ps(1, 2, 4);
        }
    }
    if (k < depth) {
        _tile_loadd(5, a + k, a_bytes);
        _tile_loadd(6, b + k * b_stride, b_bytes);
        _tile_dpbf16ps(0, 5, 6);
        if constexpr (kTwoColumns) {
            _tile_loadd(7, b + k * b_stride + kAmxTile, b_bytes);
            _tile_dpbf16ps(1, 5, 7);
        }
    }
    _tile_stored(0, c, c_bytes);
    if constexpr (kTwoColumns) _tile_stored(1, c + kAmxTile, c_bytes);
}

static void multiply_few_rows(AmxPair, const float* a, int64_t a_stride, const float* b, int64_t b_stride, int64_t depth,
                              float* c, int64_t c_stride, int64_t, int64_t columns, FetchAhead ahead) {
    int64_t j = 0;
    for (; j + 2 * kAmxTile <= columns; j += 2 * kAmxTile)
        multiply_amx_few<true>(a, a_stride, b + j, b_stride, depth, c + j, c_stride, ahead);
    if (j < columns) multiply_amx_few<false>(a, a_stride, b + j, b_stride, depth, c + j, c_stride, ahead);
}

}  // namespace FA_NAMESPACE
