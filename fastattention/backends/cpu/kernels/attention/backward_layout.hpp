// The working memory of a backward (backward.hpp): the sizes and strides of its tiles and chunks.
#pragma once

namespace FA_NAMESPACE {

// Keys of a chunk are a multiple of kDropoutKeys and so of kPanel. A chunk's keys, values and their gradients take 20 bytes
// per key and element, and share the L2 cache with a tile.
static constexpr int64_t kChunkElements = Vec::kWidth == 16 ? 32768 : 16384;  // keys times elements
static constexpr int64_t kMostChunkKeys = 256;
// Rows of a tile: a multiple of Unit::kRowStep and of the rows of a strip. The gradients of a chunk's keys are read and
// written once a tile, which limits tiles of AMX with few rows.
template <class Unit>
constexpr int64_t kBackwardRows = kMultipliesTiles<Unit> ? 192 : 96;
// Rows of a strip, for which the keys that a mask hides are left out of products.
template <class Unit>
constexpr int64_t kStripRows = kMultipliesTiles<Unit> ? 32 : 96;

// The layout of a task's memory. A matrix `x` has x_stride floats from row to row.
template <class Unit>
struct BackwardLayout {
    int64_t rows, keys;
    int64_t query_units, value_units;      // units per row, padded to the depth of a product
    int64_t query_stride, value_stride;    // for tiles (rows, elements)
    int64_t query_rows, value_rows;        // rows of matrices with elements first
    int64_t row_stride;                    // for tiles with elements first (elements, units of rows)
    int64_t query_columns, value_columns;  // whole vectors of elements
    int64_t key_stride;                    // for the chunk's keys (units of keys, elements), and a tile's gradient of q
    int64_t score_stride;                  // for scores (units of rows, keys), and the chunk's gradients (elements, keys)
    int64_t grad_s_stride;                 // for gradients of scores (rows, units of keys)

    explicit BackwardLayout(const FaAttentionParams& p) {
        constexpr int64_t kDepth = Unit::kElements * Unit::kDepthStep;
        const int64_t widest = larger(p.headdim, p.headdim_v);
        rows = kBackwardRows<Unit>;
        keys = larger(kDropoutKeys, smaller(kMostChunkKeys, kChunkElements / widest / kDropoutKeys * kDropoutKeys));
        query_units = round_up(p.headdim, kDepth) / Unit::kElements;
        value_units = round_up(p.headdim_v, kDepth) / Unit::kElements;
        query_columns = round_up(p.headdim, larger(Vec::kWidth, kDepth));
        value_columns = round_up(p.headdim_v, larger(Vec::kWidth, kDepth));
        query_stride = query_columns + kRowPadding;
        value_stride = value_columns + kRowPadding;
        query_rows = larger(query_columns, round_up(p.headdim, Unit::kRowStep));
        value_rows = larger(value_columns, round_up(p.headdim_v, Unit::kRowStep));
        row_stride = rows / Unit::kElements + kRowPadding;
        key_stride = query_stride;
        score_stride = keys + kRowPadding;
        grad_s_stride = keys / Unit::kElements + kRowPadding;
    }

    // Products take whole rows of scores, except with tiles, which keep them in the L1 cache.
    int64_t weight_floats() const { return rows / (kMultipliesTiles<Unit> ? Unit::kElements : 1) * score_stride; }
    int64_t grad_s_floats() const { return Unit::kElements == 1 ? 0 : rows * grad_s_stride; }
    int64_t score_floats() const { return 2 * weight_floats() + grad_s_floats(); }

    int64_t queries() const { return 0; }
    int64_t grads() const { return queries() + rows * query_stride; }
    int64_t queries_t() const { return grads() + rows * value_stride; }
    int64_t grads_t() const { return queries_t() + query_rows * row_stride; }
    int64_t stats() const { return grads_t() + value_rows * row_stride; }
    int64_t tile_floats() const { return stats() + kRowStats * rows; }

    // Per row: lse, +infinity if it sees no keys; delta; the factor of weights.
    static constexpr int64_t kRowStats = 3;
};

// With a block mask, rows of a tile are within a row of blocks.
template <class Unit>
FA_INLINE int64_t rows_of_tile(const FaAttentionParams& p) {
    static_assert(kBlockTileRows <= kBackwardRows<Unit>);
    return p.block_mask ? kBlockTileRows : kBackwardRows<Unit>;
}

template <class Unit>
FA_INLINE BackwardGeometry backward_geometry(const FaAttentionParams& p) {
    const BackwardLayout<Unit> l(p);
    BackwardGeometry g;
    g.tile_rows = rows_of_tile<Unit>(p);
    g.keys = l.keys;
    g.tile_floats = l.tile_floats();
    g.grad_q_floats = l.rows * l.key_stride;
    const int64_t transposed = l.keys * (l.query_units + l.value_units);
    const int64_t gradients = (l.query_rows + l.value_rows) * l.score_stride;
    g.scratch_floats = transposed + l.keys * l.key_stride + gradients + l.score_floats();
    return g;
}

}  // namespace FA_NAMESPACE
