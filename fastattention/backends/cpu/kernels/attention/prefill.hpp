// Prefill: many query rows against panels of keys and values, tile by tile with an online softmax.
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

// units: units per key, padded with zeros to whole vectors.
FA_INLINE void transpose_keys(float* block, float* panel, int64_t units) {
    for (int64_t u = 0; u < units; u += Vec::kWidth) {
        transpose_square(block + u, kBlockStride);
        for (int64_t i = 0; i < smaller(Vec::kWidth, units - u); ++i)
            store(panel + (u + i) * kPanel, load(block + i * kBlockStride + u));
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

// KeyUnit: the unit of products of queries and keys; Unit: the unit of products of weights and values.
template <class Element, class KeyUnit, class Unit>
class PrefillTile {
public:
    PrefillTile(const Call& call, const HeadPanels& head, int64_t tile, float* scratch)
        : call_(call),
          p_(*call.params),
          head_(head),
          sequence_(call.sequences[head.sequence]),
          geometry_(panel_geometry<Unit, KeyUnit>(p_)),
          softmax_(call, sequence_),
          dropout_(Dropout::of(p_)),
          rows_(call.tile(sequence_, tile, geometry_.tile_rows)),
          padded_rows_(padded_rows_of<Unit, KeyUnit>(rows_.count)),
          query_units_(geometry_.key_units - kStartUnits<KeyUnit>),
          query_stride_(query_units_ + kRowPadding) {
        constexpr int64_t kMostRowStep = Unit::kRowStep > KeyUnit::kRowStep ? Unit::kRowStep : KeyUnit::kRowStep;
        static_assert(kMostBlockTileRows + kMostRowStep - 1 <= kRoomForRows);
        queries_ = scratch;
        const int64_t room = padded_rows_of<Unit, KeyUnit>(geometry_.tile_rows);
        scores_ = queries_ + room * query_stride_ + kMaxHeaddim;
        acc_o_ = scores_ + room * kScoreStride;
        row_sum_ = acc_o_ + room * geometry_.value_stride;
    }

    void run() {
        KeyUnit::begin();  // uses AMX tiles whenever Unit does
        start();
        const TileRange& mask = sequence_.mask;
        const QueryRow first = at(0);
        const auto seen = mask.rows(first.token, at(rows_.count - 1).token);
        const int64_t step = p_.dropout_p > 0.0 ? kDropoutKeys : kPanel;
        const BlockRow blocks = call_.block_row(sequence_, first.token, first.head);
        KeyRuns kept(blocks, seen.seen_begin / step * step, seen.seen_end);
        while (gather(kept)) {
            const bool full = seen.classify(runs_[0].key, kept.past_last() - 1) == TileKind::kFull;
            multiply_queries();
            for (int64_t row = 0; row < rows_.count; ++row) softmax(row, full);
            accumulate_values();
        }
        finish();
        KeyUnit::end();
    }

private:
    static constexpr bool kInt8 = KeyUnit::kElements == 4;

    QueryRow at(int64_t row) const { return query_row(call_, head_.kv_head, rows_, row); }

    // A run of neighbouring keys, and the column of their first score.
    struct Run {
        int64_t key, column, count;
    };

    // Takes as many kept keys as a tile has room for; false if none are left. The length of every run but the very last is a
    // multiple of kPanel.
    bool gather(KeyRuns& kept) {
        num_runs_ = columns_ = 0;
        while (columns_ + kPanel <= kTileKeys && kept.next(kTileKeys - columns_)) {
            runs_[num_runs_++] = {kept.first(), columns_, kept.count()};
            columns_ += kept.count();
        }
        return num_runs_ > 0;
    }

    // The column of the first score of the keys from `key` on; keys ascend.
    int64_t column_of(int64_t key) const {
        for (int64_t i = 0; i < num_runs_; ++i)
            if (key < runs_[i].key + runs_[i].count) return runs_[i].column + larger(key - runs_[i].key, 0);
        return columns_;
    }

    // The keys of a tile, padded to the step of the product with the values.
    static int64_t padded_keys(int64_t n) { return round_up(n, larger(Vec::kWidth, Unit::kDepthStep * Unit::kElements)); }

    void start() {
        // Rows of a head are far apart if heads are side by side.
        for (int64_t row = 0; row < rows_.count; ++row) prefetch_query<Element>(call_, sequence_, at(row));
        for (int64_t row = 0; row < padded_rows_; ++row) {
            row_max_[row] = -kInfinity;
            store(row_sum_ + row * Vec::kWidth, zero());
            float* query = queries_ + row * query_stride_;
            if (row < rows_.count) {
                load_query_units(row, query);
            } else {
                // Filled by bytes: in an int8 query the offset stands for 0.
                memset(query, KeyUnit::kOffset, query_units_ * sizeof(float));
                memset(scores_ + row * kScoreStride, 0, kScoreStride * sizeof(float));
            }
        }
        memset(acc_o_, 0, padded_rows_ * geometry_.value_stride * sizeof(float));
    }

    void load_query_units(int64_t row, float* query) {
        if constexpr (kInt8) {
            query_scales_[row] =
                quantize_query<Element, KeyUnit>(call_, sequence_, at(row), head_.key_mean, query, query_units_);
        } else {
            load_query<Element>(call_, sequence_, at(row), query, query_units_ * KeyUnit::kElements);
            // Works in place, into the first half: writes never overtake reads.
            if constexpr (KeyUnit::kElements == 2)
                narrow_row(query, reinterpret_cast<Bfloat16*>(query), query_units_ * KeyUnit::kElements);
        }
    }

    void multiply_queries() {
        const int64_t units = geometry_.key_units;
        const float* keys = head_.keys + kStartUnits<KeyUnit> * kPanel;
        const int64_t rows = round_up(rows_.count, KeyUnit::kRowStep);
        for (int64_t i = 0; i < num_runs_; ++i)
            for (int64_t j = 0; j < runs_[i].count; j += kPanel)
                multiply_key_panel<KeyUnit>(queries_, query_stride_, keys + (runs_[i].key + j) * units, query_units_,
                                            scores_ + runs_[i].column + j, kScoreStride, rows,
                                            smaller(kPanel, round_up(runs_[i].count - j, Vec::kWidth)));
    }

    void softmax(int64_t row, bool full) {
        const QueryRow where = at(row);
        const int64_t begin = full ? 0 : column_of(sequence_.mask.row_begin(where.token));
        const int64_t end = full ? columns_ : column_of(sequence_.mask.row_end(where.token));
        float* scores = scores_ + row * kScoreStride;
        float factors[kTileKeys];
        const float* value_scales = nullptr;
        if (p_.dropout_p > 0.0) {
            for (int64_t i = 0; i < num_runs_; ++i)
                dropout_factors(dropout_, sequence_.batch, where, runs_[i].key, round_up(runs_[i].count, kDropoutKeys),
                                factors + runs_[i].column);
            value_scales = factors;
        }
        if (head_.value_scales) value_scales = head_.value_scales + runs_[0].key;  // of a cache, which has no block mask
        Vec highest = broadcast(-kInfinity);
        for (int64_t i = 0; i < num_runs_ && runs_[i].column < end; ++i) {
            const int64_t count = smaller(runs_[i].count, end - runs_[i].column);
            const float* key_scales = head_.key_scales ? head_.key_scales + runs_[i].key : nullptr;
            if constexpr (kInt8) {
                highest = maximum(highest, scale_products(scores + runs_[i].column, key_scales, query_scales_[row], count));
                key_scales = nullptr;
            }
            softmax_.modify(where, scores + runs_[i].column, runs_[i].key, count, key_scales);
        }
        if (sequence_.tiles) hide_pairs(where, scores, end);
        const bool known =
            kInt8 && full && !sequence_.tiles && !softmax_.modifies() && columns_ % (kVectorsAtOnce * Vec::kWidth) == 0;
        softmax_.weigh(
            scores, begin, end, padded_keys(columns_),
            {&row_max_[row], row_sum_ + row * Vec::kWidth, acc_o_ + row * geometry_.value_stride, geometry_.value_columns},
            value_scales, known ? &highest : nullptr);
    }

    // Hides what tiles of the block mask hide, in the scores before column `end`.
    void hide_pairs(QueryRow where, float* scores, int64_t end) const {
        const BlockRow blocks = call_.block_row(sequence_, where.token, where.head);
        for (int64_t i = 0; i < num_runs_; ++i) {
            const Run& run = runs_[i];
            const int64_t past_last = run.key + smaller(run.count, end - run.column);
            blocks.for_each_hidden(run.key, past_last, [&](int64_t key) { scores[run.column + key - run.key] = -kInfinity; });
        }
    }

    void accumulate_values() {
        const int64_t columns = geometry_.value_columns, stride = geometry_.value_stride;
        const int64_t rows = round_up(rows_.count, Unit::kRowStep);
        for (int64_t c = 0; c < columns; c += kPanel)
            for (int64_t i = 0; i < num_runs_; ++i)
                multiply_panel<true>(Unit{}, scores_ + runs_[i].column / Unit::kElements, kScoreStride,
                                     head_.values + runs_[i].key / Unit::kElements * stride + c, stride,
                                     padded_keys(runs_[i].count) / Unit::kElements, acc_o_ + c, stride, rows,
                                     smaller(kPanel, columns - c));
    }

    void finish() {
        for (int64_t row = 0; row < rows_.count; ++row) {
            store_result<Element>(call_, sequence_, at(row), acc_o_ + row * geometry_.value_stride, row_max_[row],
                                  reduce_add(load(row_sum_ + row * Vec::kWidth)));
        }
    }

    const Call& call_;
    const FaAttentionParams& p_;
    const HeadPanels& head_;
    const Sequence& sequence_;
    const PanelGeometry geometry_;
    const RowSoftmax<Unit> softmax_;
    const Dropout dropout_;
    const RowTile rows_;
    const int64_t padded_rows_, query_units_, query_stride_;
    Run runs_[kTileKeys / kPanel];  // the runs of the tile
    int64_t num_runs_ = 0, columns_ = 0;
    float *queries_, *scores_, *acc_o_, *row_sum_;
    float row_max_[kRoomForRows];
    QueryScale query_scales_[kInt8 ? kRoomForRows : 1];
};

template <class Element, class KeyUnit, class Unit>
static void prefill_tile(const Call& call, const HeadPanels& head, int64_t tile, float* scratch) {
    PrefillTile<Element, KeyUnit, Unit>(call, head, tile, scratch).run();
}

}  // namespace FA_NAMESPACE
