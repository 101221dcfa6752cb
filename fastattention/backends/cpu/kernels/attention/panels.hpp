// Panels of keys and values for prefill: their geometry, and how they are packed and multiplied with queries.
#pragma once

namespace FA_NAMESPACE {

// Query rows of a tile, multiples of every Unit::kRowStep. With many rows, and a large L2 cache, more of them share a panel.
// A mask that moves with the rows hides more of a tall tile, so tall tiles need more rows to pay.
static constexpr int64_t kTileRows = 48, kMostTileRows = Vec::kWidth == 16 ? 96 : 48;
static constexpr int64_t kManyRows = 1024, kManyMaskedRows = 4096;
// Query rows of a tile within a row of blocks of a block mask. Block sizes are multiples of the first, often of the second.
static constexpr int64_t kBlockTileRows = kBlockStep, kMostBlockTileRows = 2 * kBlockStep;
static_assert(kBlockStep % kPanel == 0 && kBlockStep % kDropoutKeys == 0, "panels and groups of keys are within a block");
static constexpr int64_t kWidestOfTallTiles = 256;  // head dimension up to which the L2 cache has room for tall tiles
static constexpr int64_t kRoomForRows = 144;        // rows of any of these tiles, padded to the row step of a product
// Keys of a tile. At any time the L2 cache holds a panel of keys, or as many columns of the tile's values, and the queries,
// scores and results of the tile's rows. With heads of 512 floats that is about 700 KB with AVX-512, whose processors have 1
// MB and more, and 280 KB elsewhere.
static constexpr int64_t kTileKeys = Vec::kWidth == 16 ? 512 : 256;
static constexpr int64_t kScoreStride = kTileKeys + kRowPadding;
// Elements of a key that are multiplied, for all keys of a panel, before the next ones. In pairs of bfloat16, 32 keys and
// the queries of a tile then fit an L1 cache of 48 KB, which AMX reads all the time.
static constexpr int64_t kDepthElements = 256;
// With more columns, rows of values and results are padded too.
static constexpr int64_t kUnpaddedColumns = 256;

// `rows` padded for products with either unit.
template <class Unit, class KeyUnit>
FA_INLINE int64_t padded_rows_of(int64_t rows) {
    return larger(round_up(rows, Unit::kRowStep), round_up(rows, KeyUnit::kRowStep));
}

// Keys padded to the step of the product of weights and values.
template <class Unit>
FA_INLINE int64_t padded_keys(int64_t n) {
    return round_up(n, larger(Vec::kWidth, Unit::kDepthStep * Unit::kElements));
}

// Rows at the start of a panel with initial values of sums, one per key; only for units with an offset.
template <class KeyUnit>
static constexpr int64_t kStartUnits = KeyUnit::kOffset == 0 ? 0 : 1;

// Unit: the unit of weights and values; KeyUnit: the unit of queries and keys.
template <class Unit, class KeyUnit = Unit>
FA_INLINE PanelGeometry panel_geometry(const FaAttentionParams& p) {
    PanelGeometry g;
    g.panel = kPanel;
    g.key_units = kStartUnits<KeyUnit> + round_up(p.headdim, KeyUnit::kElements * KeyUnit::kDepthStep) / KeyUnit::kElements;
    g.keys_per_unit = Unit::kElements;
    g.value_columns = round_up(p.headdim_v, Vec::kWidth);
    g.value_stride = g.value_columns > kUnpaddedColumns ? g.value_columns + kRowPadding : g.value_columns;
    const bool masked = p.window_left >= 0 || p.window_right >= 0;
    const int64_t rows = p.seqlen_q * (p.nheads / p.nheads_k);
    g.tile_rows = rows < (masked ? kManyMaskedRows : kManyRows) ? kTileRows : kMostTileRows;
    if (p.block_mask) {
        const bool tall = Vec::kWidth == 16 && larger(p.headdim, p.headdim_v) <= kWidestOfTallTiles;
        g.tile_rows = tall && p.block_m % kMostBlockTileRows == 0 ? kMostBlockTileRows : kBlockTileRows;
    }
    const int64_t padded_rows = padded_rows_of<Unit, KeyUnit>(g.tile_rows);
    const int64_t query_stride = g.key_units + kRowPadding;
    // A query is widened before it is narrowed to pairs, so the last row needs more room.
    g.scratch_floats = padded_rows * (query_stride + kScoreStride + g.value_stride + Vec::kWidth) + kMaxHeaddim;
    return g;
}

// Addresses of the rows of a panel. They may be far apart, so they are prefetched here, as hardware would not do it in time.
struct PanelRows {
    char* keys[kPanel];
    char* values[kPanel];

    PanelRows(const Call& call, const HeadPanels& head, int64_t first, int64_t n) {
        const Sequence& s = call.sequences[head.sequence];
        call.keys(s, head.kv_head).addresses(first, n, keys);
        call.values(s, head.kv_head).addresses(first, n, values);
        for (int64_t j = 0; j < n; ++j) {
            prefetch_bytes(keys[j], call.params->headdim * call.cache_element_size);
            prefetch_bytes(values[j], call.params->headdim_v * call.cache_element_size);
        }
    }
};

// The scales of a panel's keys and values; 0 past the end.
template <class Stored>
FA_INLINE void pack_scales(const Call& call, const HeadPanels& head, int64_t first, int64_t n) {
    if constexpr (kQuantized<Stored>) {
        const Sequence& s = call.sequences[head.sequence];
        load_scales(call.key_scales(s, head.kv_head), first, n, head.key_scales + first);
        load_scales(call.value_scales(s, head.kv_head), first, n, head.value_scales + first);
        for (int64_t j = n; j < kPanel; ++j) head.key_scales[first + j] = head.value_scales[first + j] = 0.0f;
    }
}

// Keys are copied to a block, one key per lane of a vector, before their units are transposed into a panel. Read together
// from a cache where they are 4 KB apart, they would evict each other.
static constexpr int64_t kBlockStride = kMaxHeaddim + kRowPadding;

// units: units per key, padded with zeros to whole vectors. stride: from one unit of the panel to the next.
FA_INLINE void transpose_keys(float* block, float* panel, int64_t units, int64_t stride = kPanel) {
    for (int64_t u = 0; u < units; u += Vec::kWidth) {
        transpose_square(block + u, kBlockStride);
        for (int64_t i = 0; i < smaller(Vec::kWidth, units - u); ++i)
            store(panel + (u + i) * stride, load(block + i * kBlockStride + u));
    }
}

// Copies a key to units. `key` is zero beforehand, so its last unit is padded with zeros.
template <class Stored>
FA_INLINE void load_key(const Stored* from, float* key, int64_t n, FloatUnit) {
    widen_row(from, key, n, n);
}

#ifdef FA_HAS_BF16_DOT
FA_INLINE void copy_row(const Bfloat16* from, Bfloat16* to, int64_t n) { memcpy(to, from, n * sizeof(Bfloat16)); }

template <class Stored>
FA_INLINE void copy_row(const Stored* from, Bfloat16* to, int64_t n) {
    float wide[kMaxHeaddim + Vec::kWidth];
    widen_row(from, wide, n, n);
    narrow_row(wide, to, n);
}

template <class Stored, class Pair>
FA_INLINE void load_key(const Stored* from, float* key, int64_t n, Pair) {
    copy_row(from, reinterpret_cast<Bfloat16*>(key), n);
}
#endif

// Packs n keys of a panel, transposed. Keys after the last become zeros: their scores are masked, and zeros keep memory
// after the sequence out of the products.
template <class Stored, class KeyUnit>
static void pack_keys(const Call& call, const HeadPanels& head, char* const* rows, int64_t first, int64_t n,
                      int64_t key_units) {
    constexpr int64_t kStart = kStartUnits<KeyUnit>;
    const int64_t headdim = call.params->headdim, units = key_units - kStart;
    float* panel = head.keys + first * key_units;
    Scaled scaled{};
    if constexpr (KeyUnit::kElements == 4) scaled = scale_of_group<Stored>(call, head, first);
    float block[Vec::kWidth * kBlockStride];
    for (int64_t j = 0; j < kPanel; ++j) {
        float* key = block + j % Vec::kWidth * kBlockStride;
        memset(key, 0, round_up(units, Vec::kWidth) * sizeof(float));
        if constexpr (KeyUnit::kElements == 4) {
            const int32_t start =
                j < n ? quantize_key<KeyUnit, Stored>(rows[j], head.key_mean, scaled.factor, key, headdim) : 0;
            head.key_scales[first + j] = j < n ? scaled.scale : 0.0f;
            if (kStart) memcpy(panel + j, &start, sizeof(start));
        } else if (j < n) {
            load_key(reinterpret_cast<const Stored*>(rows[j]), key, headdim, KeyUnit{});
        }
        if ((j + 1) % Vec::kWidth == 0) transpose_keys(block, panel + kStart * kPanel + j + 1 - Vec::kWidth, units);
    }
}

// Packs the values of the same keys.
template <class Stored>
static void pack_values(char* const* rows, float* values, int64_t n, int64_t headdim_v, const PanelGeometry& g, FloatUnit) {
    for (int64_t j = 0; j < kPanel; ++j, values += g.value_stride) {
        if (j < n) {
            widen_row(reinterpret_cast<const Stored*>(rows[j]), values, headdim_v, g.value_columns);
        } else {
            memset(values, 0, g.value_columns * sizeof(float));
        }
    }
}

#ifdef FA_HAS_BF16_DOT
template <class Stored, class Pair>
static void pack_values(char* const* rows, float* values, int64_t n, int64_t headdim_v, const PanelGeometry& g, Pair) {
    Bfloat16 pair[2][kMaxHeaddimV + 2 * Vec::kWidth] = {};
    for (int64_t j = 0; j < kPanel; j += 2, values += g.value_stride) {
        for (int64_t i = 0; i < 2; ++i) {
            if (j + i < n) {
                copy_row(reinterpret_cast<const Stored*>(rows[j + i]), pair[i], headdim_v);
            } else {
                memset(pair[i], 0, headdim_v * sizeof(Bfloat16));
            }
        }
        pair_row(pair[0], pair[1], values, g.value_columns);
    }
}
#endif

// Packs one panel of keys and the values of the same keys. Values of a quantized cache are packed without their scales, as
// floats and bfloat16 hold them exactly; scales multiply the scores and the probabilities.
template <class Stored, class KeyUnit, class Unit>
static void pack_panel(const Call& call, const HeadPanels& head, int64_t panel) {
    const PanelGeometry g = panel_geometry<Unit, KeyUnit>(*call.params);
    const int64_t first = panel * kPanel;
    const int64_t n = smaller(kPanel, call.sequences[head.sequence].mask.seqlen_k - first);
    const PanelRows rows(call, head, first, n);
    pack_keys<Stored, KeyUnit>(call, head, rows.keys, first, n, g.key_units);
    float* values = head.values + first / g.keys_per_unit * g.value_stride;
    pack_values<Stored>(rows.values, values, n, call.params->headdim_v, g, Unit{});
    pack_scales<Stored>(call, head, first, n);
}

// result = rows (rows, units of elements) times the first `columns` keys of a panel with elements first.
template <class Unit>
FA_INLINE void multiply_key_panel(const float* rows, int64_t stride, const float* panel, int64_t units, float* result,
                                  int64_t result_stride, int64_t num_rows, int64_t columns) {
    constexpr bool kWhole = Unit::kOffset != 0;  // the initial value of sums is for all units
    constexpr int64_t kDepth = kWhole ? kMaxHeaddim : kDepthElements / Unit::kElements;
    multiply_panel<false>(Unit{}, rows, stride, panel, kPanel, smaller(kDepth, units), result, result_stride, num_rows,
                          columns);
    if constexpr (!kWhole)
        for (int64_t u = kDepth; u < units; u += kDepth)
            multiply_panel<true>(Unit{}, rows + u, stride, panel + u * kPanel, kPanel, smaller(kDepth, units - u), result,
                                 result_stride, num_rows, columns);
}

}  // namespace FA_NAMESPACE
