// The weights of a prefill tile: products of its queries with a tile of keys, then the online softmax, row by row.
#pragma once

namespace FA_NAMESPACE {

// A run of neighbouring keys, and the column of their first score.
struct KeyRun {
    int64_t key, column, count;
};

// The rows of a tile, the keys that it works on at a time, and its memory. Rows are padded for products.
struct TileWork {
    const Call& call;
    const HeadPanels& head;
    const Sequence& sequence;
    const RowTile rows;
    const int64_t key_units, query_units, query_stride, value_columns, value_stride;
    float *queries, *scores, *acc_o, *row_sum;  // scores become weights; a sum is a vector of partial sums
    float row_max[kRoomForRows] = {};            // the maximum, or what weights are relative to instead
    QueryScale query_scales[kRoomForRows] = {};  // with int8 products
    KeyRun runs[kTileKeys / kPanel] = {};  // the length of every run but the last of all is a multiple of kPanel
    int64_t num_runs = 0, columns = 0;

    QueryRow at(int64_t row) const { return query_row(call, head.kv_head, rows, row); }

    RunningRow running(int64_t row) {
        return {&row_max[row], row_sum + row * Vec::kWidth, acc_o + row * value_stride, value_columns};
    }

    // Hides what tiles of the block mask hide, in the scores of n keys from `key` on.
    void hide_pairs(QueryRow where, float* scores, int64_t key, int64_t n) const {
        const BlockRow blocks = call.block_row(sequence, where.token, where.head);
        blocks.for_each_hidden(key, key + n, [&](int64_t hidden) { scores[hidden - key] = -kInfinity; });
    }
};

// Scores of all rows first, which fill the L2 cache, then their weights.
template <class KeyUnit, class Unit>
class TileWeights {
public:
    explicit TileWeights(TileWork& work)
        : work_(work), softmax_(work.call, work.sequence), dropout_(Dropout::of(*work.call.params)) {}

    // full: every row sees every key.
    void run(bool full) {
        multiply_queries();
        for (int64_t row = 0; row < work_.rows.count; ++row) weigh(row, full);
    }

private:
    static constexpr bool kInt8 = KeyUnit::kElements == 4;

    // The column of the first score of the keys from `key` on; keys ascend.
    int64_t column_of(int64_t key) const {
        for (int64_t i = 0; i < work_.num_runs; ++i) {
            const KeyRun& run = work_.runs[i];
            if (key < run.key + run.count) return run.column + larger(key - run.key, 0);
        }
        return work_.columns;
    }

    void multiply_queries() {
        const float* keys = work_.head.keys + kStartUnits<KeyUnit> * kPanel;
        const int64_t rows = round_up(work_.rows.count, KeyUnit::kRowStep);
        for (int64_t i = 0; i < work_.num_runs; ++i) {
            const KeyRun& run = work_.runs[i];
            for (int64_t j = 0; j < run.count; j += kPanel)
                multiply_key_panel<KeyUnit>(work_.queries, work_.query_stride, keys + (run.key + j) * work_.key_units,
                                            work_.query_units, work_.scores + run.column + j, kScoreStride, rows,
                                            smaller(kPanel, round_up(run.count - j, Vec::kWidth)));
        }
    }

    void weigh(int64_t row, bool full) {
        const HeadPanels& head = work_.head;
        const QueryRow where = work_.at(row);
        const int64_t begin = full ? 0 : column_of(work_.sequence.mask.row_begin(where.token));
        const int64_t end = full ? work_.columns : column_of(work_.sequence.mask.row_end(where.token));
        float* scores = work_.scores + row * kScoreStride;
        float factors[kTileKeys];
        const float* value_scales = nullptr;
        if (dropout_.drops()) {
            for (int64_t i = 0; i < work_.num_runs; ++i)
                dropout_factors(dropout_, work_.sequence.batch, where, work_.runs[i].key,
                                round_up(work_.runs[i].count, kDropoutKeys), factors + work_.runs[i].column);
            value_scales = factors;
        }
        // Caches have no block mask, so that there is one run.
        if (head.value_scales) value_scales = head.value_scales + work_.runs[0].key;
        Vec highest = broadcast(-kInfinity);
        for (int64_t i = 0; i < work_.num_runs && work_.runs[i].column < end; ++i) {
            const KeyRun& run = work_.runs[i];
            const int64_t count = smaller(run.count, end - run.column);
            const float* key_scales = head.key_scales ? head.key_scales + run.key : nullptr;
            if constexpr (kInt8) {
                const QueryScale& query = work_.query_scales[row];
                highest = maximum(highest, scale_products(scores + run.column, key_scales, query, count));
                key_scales = nullptr;
            }
            softmax_.modify(where, scores + run.column, run.key, count, key_scales);
            if (work_.sequence.tiles) work_.hide_pairs(where, scores + run.column, run.key, count);
        }
        const bool known = kInt8 && full && !work_.sequence.tiles && !softmax_.modifies() &&
                           work_.columns % (kVectorsAtOnce * Vec::kWidth) == 0;
        softmax_.weigh(scores, begin, end, padded_keys<Unit>(work_.columns), work_.running(row), value_scales,
                       known ? &highest : nullptr);
    }

    TileWork& work_;
    const RowSoftmax<Unit> softmax_;
    const Dropout dropout_;
};

}  // namespace FA_NAMESPACE
