// The weights of a tile of rows and a run of keys in a backward (backward.hpp), and the gradients of their scores.
#pragma once

namespace FA_NAMESPACE {

// A chunk of keys, and the results of ScoreGradients for a tile. Keys count from the first one of the chunk.
template <class Unit>
struct ChunkWork {
    const Call& call;
    const Sequence& sequence;
    const BackwardLayout<Unit> layout;
    int64_t kv_head;
    int64_t first_key, num_keys;
    float *keys_t, *values_t;  // elements first, in panels
    float *weights, *grad_s;   // units of rows
    float* grad_s_rows;        // the same row by row, in units of keys

    QueryRow row_at(const RowTile& rows, int64_t row) const { return query_row(call, kv_head, rows, row); }
};

// The rows of a tile, as RowPacker leaves them.
struct PackedRows {
    RowTile tile;
    int64_t count;  // padded to the steps of products
    const float *queries, *grads;  // of the first row
    const float* stats;            // lse of all rows; after them delta, and then the factor of weights
};

// Turns the products of one row into weights and gradients of its scaled products.
// kModified: scores are more than scaled products; kMasked: some keys are hidden; kDrops: weights are dropped.
template <class Unit, bool kModified, bool kMasked, bool kDrops>
class RowGradients {
public:
    RowGradients(const ChunkWork<Unit>& work, const PackedRows& rows)
        : work_(work),
          tile_(rows.tile),
          stats_(rows.stats),
          stats_stride_(work.layout.rows),
          scale_(broadcast(ScoreUnits::of(*work.call.params).log2)) {}

    // Moves to a row and the keys from `first` to before `end`. factors: those of dropout, from `first` on.
    __attribute__((always_inline)) void set(int64_t row, int64_t first, int64_t end, const float* factors) {
        first_ = first;
        factors_ = factors;
        const float lse = stats_[row];
        delta_ = broadcast(stats_[row + stats_stride_]);
        shift_ = broadcast(-lse * kLog2E);
        if (!kModified && !kMasked) return;
        // A padding row is like the last row, but its lse makes all weights 0.
        const QueryRow where = work_.row_at(tile_, smaller(row, tile_.count - 1));
        if (kModified) {
            score_ = score_row(work_.call, work_.sequence, where.token, where.head);
            lse_ = broadcast(lse);
            factor_ = broadcast(stats_[row + 2 * stats_stride_]);
        }
        if (kMasked) mask(where, end);
    }

    // Turns the products p and dp with keys from j on into weights and gradients of scores.
    // Dropout multiplies weights before their product with values, and therefore the gradients of weights too.
    __attribute__((always_inline)) void differentiate(int64_t j, Vec& p, Vec& dp) const {
        Vec slope = broadcast(1.0f);
        if (kModified) {
            const Vec score = modified_scores(score_, p, work_.first_key + j, larger(work_.num_keys - j, 0), &slope);
            p = weight((score - lse_) * broadcast(kLog2E)) * factor_;
        } else {
            p = weight(fma(p, scale_, shift_));
        }
        if (kDrops) dp = dp * load(factors_ + j - first_);
        dp = p * (dp - delta_);
        if (kDrops) p = p * load(factors_ + j - first_);
        if (kModified) dp = dp * slope;
        if (kMasked) {
            const Vec index = broadcast(static_cast<float>(j)) + iota();
            p = select_less(index, end_, select_less(index, begin_, zero(), p), zero());
            dp = select_less(index, end_, select_less(index, begin_, zero(), dp), zero());
            if (work_.sequence.tiles) {
                const Vec visible = load(visible_ + j - first_);
                p = select_less(zero(), visible, p, zero());
                dp = select_less(zero(), visible, dp, zero());
            }
        }
    }

private:
    void mask(QueryRow where, int64_t end) {
        const int64_t first_key = work_.first_key;
        const TileRange& mask = work_.sequence.mask;
        begin_ = broadcast(static_cast<float>(mask.row_begin(where.token) - first_key));
        end_ = broadcast(static_cast<float>(mask.row_end(where.token) - first_key));
        if (!work_.sequence.tiles) return;
        for (int64_t j = 0; j < end - first_; ++j) visible_[j] = 1.0f;
        const BlockRow blocks = work_.call.block_row(work_.sequence, where.token, where.head);
        blocks.for_each_hidden(first_key + first_, smaller(first_key + end, mask.seqlen_k),
                               [&](int64_t key) { visible_[key - first_key - first_] = 0.0f; });
    }

    // 2^x, at most 1: x is above 0 only by rounding, which is much where lse is large.
    FA_INLINE Vec weight(Vec x) { return exp2<Unit::kElements == 1>(minimum(zero(), x)); }

    const ChunkWork<Unit>& work_;
    const RowTile tile_;
    const float* const stats_;
    const int64_t stats_stride_;
    const Vec scale_;  // of products, if scores are not modified
    ScoreRow score_;
    Vec lse_, delta_, factor_, shift_;
    Vec begin_, end_;  // the keys that the row sees
    int64_t first_ = 0;
    const float* factors_ = nullptr;
    float visible_[kMostChunkKeys];  // 0 where tiles of a block mask hide a key, 1 elsewhere; only if there are such
};

// Calls run<kModified, kMasked, kDrops>() of `kernel`. full: every row sees every key.
template <class Kernel>
FA_INLINE void run_gradients(const FaAttentionParams& p, bool full, const Kernel& kernel) {
    const bool modified = ScoreUnits::of(p).modified, drops = p.dropout_p > 0.0;
    if (modified && drops) return kernel.template run<true, true, true>();
    if (modified) return kernel.template run<true, true, false>();
    if (drops) return kernel.template run<false, true, true>();
    if (full) return kernel.template run<false, false, false>();
    kernel.template run<false, true, false>();
}

// Products of a whole tile with the run, then row by row.
template <class Unit>
class ScoreGradients {
public:
    explicit ScoreGradients(const ChunkWork<Unit>& work) : work_(work) {}

    // The key of a column of weights and gradients. As many keys as kOrdered are in as many columns.
    static constexpr int64_t kOrdered = Vec::kWidth;
    static int64_t key_of(int64_t column) { return column; }

    // begin, end: the run, in whole panels. seen: what the tile sees.
    void run(const PackedRows& rows, int64_t begin, int64_t end, const RowsRange<long long>& seen) const {
        const BackwardLayout<Unit>& l = work_.layout;
        for (int64_t j = begin; j < end; j += kPanel) {
            multiply_key_panel<Unit>(rows.queries, l.query_stride, work_.keys_t + j * l.query_units, l.query_units,
                                     work_.weights + j, l.score_stride, rows.count, kPanel);
            multiply_key_panel<Unit>(rows.grads, l.value_stride, work_.values_t + j * l.value_units, l.value_units,
                                     work_.grad_s + j, l.score_stride, rows.count, kPanel);
        }
        const bool full =
            !work_.sequence.tiles && seen.classify(work_.first_key + begin, work_.first_key + end - 1) == TileKind::kFull;
        run_gradients(*work_.call.params, full, RowByRow{work_, rows, begin, end});
    }

private:
    struct RowByRow {
        const ChunkWork<Unit>& work;
        const PackedRows& rows;
        int64_t begin, end;

        // Overwrites the products with weights and gradients: floats in place, pairs of two neighbouring rows in the first
        // half of the rows, which have been read by then.
        template <bool kModified, bool kMasked, bool kDrops>
        void run() const {
            const int64_t stride = work.layout.score_stride;
            RowGradients<Unit, kModified, kMasked, kDrops> first(work, rows), second(work, rows);
            float factors[2][kMostChunkKeys];
            for (int64_t i = 0; i < rows.count; i += Unit::kElements) {
                float *p = work.weights + i * stride, *dp = work.grad_s + i * stride;
                first.set(i, begin, end, draw<kDrops>(i, factors[0]));
                if constexpr (Unit::kElements == 1) {
                    for (int64_t j = begin; j < end; j += Vec::kWidth) {
                        Vec weight = load(p + j), grad = load(dp + j);
                        first.differentiate(j, weight, grad);
                        store(p + j, weight);
                        store(dp + j, grad);
                    }
                } else {
                    second.set(i + 1, begin, end, draw<kDrops>(i + 1, factors[1]));
                    float *p_pairs = work.weights + i / 2 * stride, *dp_pairs = work.grad_s + i / 2 * stride;
                    float* row = work.grad_s_rows + i * work.layout.grad_s_stride;
                    auto *dp_row = reinterpret_cast<Bfloat16*>(row), *row_below = dp_row + 2 * work.layout.grad_s_stride;
                    for (int64_t j = begin; j < end; j += Vec::kWidth) {
                        Vec weight = load(p + j), grad = load(dp + j);
                        Vec weight_below = load(p + stride + j), grad_below = load(dp + stride + j);
                        first.differentiate(j, weight, grad);
                        second.differentiate(j, weight_below, grad_below);
                        store(p_pairs + j, Unit::pack(weight, weight_below));
                        store(dp_pairs + j, Unit::pack(grad, grad_below));
                        store(dp_row + j, grad);
                        store(row_below + j, grad_below);
                    }
                }
            }
        }

        // Draws a row's factors of dropout. Returns that of the first key.
        template <bool kDrops>
        const float* draw(int64_t row, float* factors) const {
            if (!kDrops) return nullptr;
            const int64_t first = begin / kDropoutKeys * kDropoutKeys;
            const QueryRow where = work.row_at(rows.tile, smaller(row, rows.tile.count - 1));
            dropout_factors(Dropout::of(*work.call.params), work.sequence.batch, where, work.first_key + first,
                            round_up(end - first, kDropoutKeys), factors);
            return factors + begin - first;
        }
    };

    const ChunkWork<Unit>& work_;
};

}  // namespace FA_NAMESPACE
