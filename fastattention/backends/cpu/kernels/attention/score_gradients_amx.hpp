// The gradients of scores with AMX: pieces of 32 rows and 32 keys, whose products never leave the L1 cache.
#pragma once

namespace FA_NAMESPACE {

template <>
class ScoreGradients<AmxPair> {
public:
    explicit ScoreGradients(const ChunkWork<AmxPair>& work) : work_(work), drops_(work.call.params->dropout_p > 0.0) {}

    void run(const PackedRows& rows, int64_t begin, int64_t end, const RowsRange<long long>&) {
        for (int64_t panel = begin; panel < end; panel += kPanel)
            for (int64_t row = 0; row < rows.count; row += kRows) {
                const int64_t last = smaller(row + kRows, rows.tile.count) - 1;
                if (drops_) draw(rows, panel, row, last);
                const auto seen =
                    work_.sequence.mask.rows(work_.row_at(rows.tile, row).token, work_.row_at(rows.tile, last).token);
                for (int64_t part = 0; part < kPanel; part += kKeys) {
                    const int64_t key = panel + part;
                    const TileKind kind = seen.classify(work_.first_key + key, work_.first_key + key + kKeys - 1);
                    if (kind == TileKind::kSkipped) {
                        clear(row, key);
                        continue;
                    }
                    multiply(rows, row, panel, part);
                    const bool full = kind == TileKind::kFull && !work_.sequence.tiles;
                    run_gradients(*work_.call.params, full, Piece{*this, rows, row, key, factors_ + part});
                }
            }
    }

    // Columns of weights and gradients are in the order of store_in_lanes, the same for all pieces.
    static constexpr int64_t kOrdered = 2 * Vec::kWidth;
    static int64_t key_of(int64_t column) { return column / kOrdered * kOrdered + element_in_lanes(column % kOrdered); }

private:
    static constexpr int64_t kRows = 2 * kAmxTile, kKeys = 2 * kAmxTile;  // of a piece
    static_assert(kRows == kStripRows<AmxPair> && kKeys == 2 * Vec::kWidth && kPanel == kDropoutKeys);

    void multiply(const PackedRows& rows, int64_t row, int64_t panel, int64_t part) {
        const BackwardLayout<AmxPair>& l = work_.layout;
        multiply_tiles<AmxPair, true>(rows.queries + row * l.query_stride, l.query_stride,
                                      work_.keys_t + panel * l.query_units + part, kPanel, l.query_units);
        store_tiles<true, true>(products_, kKeys);
        multiply_tiles<AmxPair, true>(rows.grads + row * l.value_stride, l.value_stride,
                                      work_.values_t + panel * l.value_units + part, kPanel, l.value_units);
        store_tiles<true, true>(grads_, kKeys);
    }

    struct Piece {
        ScoreGradients& self;
        const PackedRows& rows;
        int64_t row, key;
        const float* factors;

        template <bool kModified, bool kMasked, bool kDrops>
        void run() const {
            const ChunkWork<AmxPair>& work = self.work_;
            const int64_t stride = work.layout.score_stride, row_stride = work.layout.grad_s_stride;
            RowGradients<AmxPair, kModified, kMasked, kDrops> of_row(work, rows);
            float *weights = work.weights + row / 2 * stride + key, *grads = work.grad_s + row / 2 * stride + key;
            float* grad_row = work.grad_s_rows + row * row_stride + key / 2;
            for (int64_t i = 0; i < kRows; i += 2, weights += stride, grads += stride) {
                Vec p[2], ds[2];  // of two rows, in pairs of keys
                for (int64_t k = 0; k < 2; ++k, grad_row += row_stride) {
                    of_row.set(row + i + k, key, key + kKeys, factors + (i + k) * kPanel);
                    const int64_t at = (i + k) * kKeys;
                    Vec first = load(self.products_ + at), second = load(self.products_ + at + Vec::kWidth);
                    Vec first_grad = load(self.grads_ + at), second_grad = load(self.grads_ + at + Vec::kWidth);
                    of_row.differentiate(key, first, first_grad);
                    of_row.differentiate(key + Vec::kWidth, second, second_grad);
                    p[k] = narrow_two(first, second);
                    ds[k] = narrow_two(first_grad, second_grad);
                    store(grad_row, ds[k]);
                }
                store_in_lanes(weights, p[0], p[1]);
                store_in_lanes(grads, ds[0], ds[1]);
            }
        }
    };

    // Clears what products read of a piece that no row sees.
    void clear(int64_t row, int64_t key) {
        const int64_t stride = work_.layout.score_stride, row_stride = work_.layout.grad_s_stride;
        for (int64_t i = row / 2; i < (row + kRows) / 2; ++i) {
            memset(work_.weights + i * stride + key, 0, kKeys * sizeof(float));
            memset(work_.grad_s + i * stride + key, 0, kKeys * sizeof(float));
        }
        for (int64_t i = row; i < row + kRows; ++i)
            memset(work_.grad_s_rows + i * row_stride + key / 2, 0, kKeys * sizeof(Bfloat16));
    }

    void draw(const PackedRows& rows, int64_t panel, int64_t first, int64_t last) {
        for (int64_t row = first; row <= last; ++row)
            dropout_factors(Dropout::of(*work_.call.params), work_.sequence.batch, work_.row_at(rows.tile, row),
                            work_.first_key + panel, kPanel, factors_ + (row - first) * kPanel);
    }

    const ChunkWork<AmxPair>& work_;
    const bool drops_;
    alignas(64) float products_[kRows * kKeys];
    alignas(64) float grads_[kRows * kKeys];
    alignas(64) float factors_[kRows * kPanel] = {};  // with dropout
};

}  // namespace FA_NAMESPACE
