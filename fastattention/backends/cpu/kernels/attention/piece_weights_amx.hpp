// The weights of a prefill tile with AMX: pieces of 32 rows and 32 keys, whose scores never leave the L1 cache. While tiles
// multiply a piece, vectors weigh the one before it.
//
// Weights of a row are relative to a reference: the highest score of the first keys that it saw. It is raised where a score
// exceeds it by more than 4 in log2, so that seldom anything is rescaled. No weight is above 16.
#pragma once

namespace FA_NAMESPACE {

// How weights are stored for a product.
template <class Unit>
struct StoredWeight {
    using Type = float;
};
template <>
struct StoredWeight<AmxPair> {
    using Type = Bfloat16;
};

template <class KeyUnit, class Unit>
class PieceWeights {
public:
    explicit PieceWeights(TileWork& work)
        : work_(work),
          softmax_(work.call, work.sequence),
          dropout_(Dropout::of(*work.call.params)),
          margin_(kMargin / softmax_.units().log2),
          modifies_(kInt8 || softmax_.modifies() || work.head.key_scales || work.head.value_scales || work.sequence.tiles ||
                    dropout_.drops()) {
        for (int64_t row = 0; row < work.rows.count; ++row) refer(row, -kInfinity);
        for (int64_t row = 0; row < work.rows.count; row += kRows)
            seen_[row / kRows] =
                work.sequence.mask.rows(work.at(row).token, work.at(smaller(row + kRows, work.rows.count) - 1).token);
    }

    // full: every row sees every key.
    void run(bool full) {
        Piece now{};
        if (!next(now, full)) return;
        multiply(now);
        store_product(now);
        for (Piece ahead = now;; now = ahead) {
            const bool more = next(ahead, full);
            // Tiles hold the product until scores of the piece before it have been read: a load would wait for a store.
            if (more) multiply(ahead);
            weigh(now);
            if (!more) return;
            store_product(ahead);
        }
    }

private:
    using Weight = typename StoredWeight<Unit>::Type;
    static constexpr bool kInt8 = KeyUnit::kElements == 4;
    static constexpr int64_t kRows = 2 * kAmxTile, kKeys = 2 * kAmxTile;  // of a piece
    static constexpr float kMargin = 4.0f;  // in log2
    static_assert(kPanel % kKeys == 0 && kDropoutKeys == kPanel && kKeys == 2 * Vec::kWidth);

    // A place among the runs, panels, rows and parts of panels, from the outermost to the innermost.
    struct Piece {
        int64_t run = 0, panel = 0, row = 0, part = -kKeys;
        bool full = false;  // every row sees every key
    };

    int64_t key_of(const Piece& piece) const { return work_.runs[piece.run].key + piece.panel + piece.part; }
    int64_t column_of(const Piece& piece) const { return work_.runs[piece.run].column + piece.panel + piece.part; }
    // Keys of the piece that exist.
    int64_t keys_of(const Piece& piece) const {
        return smaller(kKeys, work_.runs[piece.run].count - piece.panel - piece.part);
    }
    int64_t past_last_row(const Piece& piece) const { return smaller(piece.row + kRows, work_.rows.count); }

    // Moves to the next piece that a row sees, and makes weights of those before it zero; false if there is none.
    bool next(Piece& piece, bool full) {
        while (move(piece)) {
            const int64_t key = key_of(piece), n = keys_of(piece);
            const TileKind kind = full ? TileKind::kFull : seen_[piece.row / kRows].classify(key, key + n - 1);
            piece.full = kind == TileKind::kFull && n == kKeys;
            if (kind != TileKind::kSkipped) return true;
            for (int64_t row = piece.row; row < past_last_row(piece); ++row)
                memset(weights(row, column_of(piece)), 0, kKeys * sizeof(Weight));
        }
        return false;
    }

    bool move(Piece& piece) const {
        const int64_t left = work_.runs[piece.run].count - piece.panel;
        if ((piece.part += kKeys) < smaller(kPanel, left)) return true;
        piece.part = 0;
        if ((piece.row += kRows) < work_.rows.count) return true;
        piece.row = 0;
        if (left > kPanel) {
            piece.panel += kPanel;
            return true;
        }
        piece.panel = 0;
        return ++piece.run < work_.num_runs;
    }

    // Rows from row + kAmxTile on are another tile.
    bool two_tiles(const Piece& piece) const { return work_.rows.count - piece.row > kAmxTile; }

    void multiply(const Piece& piece) const {
        const float* keys = work_.head.keys + (work_.runs[piece.run].key + piece.panel) * work_.key_units + piece.part;
        const float* queries = work_.queries + piece.row * work_.query_stride;
        if (two_tiles(piece)) {
            multiply_tiles<KeyUnit, true>(queries, work_.query_stride, keys, kPanel, work_.query_units);
        } else {
            multiply_tiles<KeyUnit, false>(queries, work_.query_stride, keys, kPanel, work_.query_units);
        }
    }

    void store_product(const Piece& piece) {
        if (two_tiles(piece)) {
            store_tiles<true, true>(scores_, kKeys);
        } else {
            store_tiles<false, true>(scores_, kKeys);
        }
    }

    void weigh(const Piece& piece) {
        if (!piece.full || modifies_) return weigh_modified(piece);
        const int64_t end = past_last_row(piece);
        RowOfPiece at = row_of(piece, piece.row);
        for (int64_t row = piece.row; row < end; ++row, at.step()) weigh_row<false>(row, at, nullptr);
    }

    void weigh_modified(const Piece& piece) {
        if (dropout_.drops()) draw(piece);
        for (int64_t row = piece.row; row < past_last_row(piece); ++row) {
            const RowOfPiece at = row_of(piece, row);
            modify(row, piece, at.scores);
            if (const float* scales = value_scales(row, piece)) {
                weigh_row<true>(row, at, scales);
            } else {
                weigh_row<false>(row, at, nullptr);
            }
        }
    }

    // Turns products into scores, -inf where hidden.
    void modify(int64_t row, const Piece& piece, float* scores) const {
        const int64_t key = key_of(piece), n = keys_of(piece);
        const QueryRow where = work_.at(row);
        const float* key_scales = work_.head.key_scales ? work_.head.key_scales + key : nullptr;
        if constexpr (kInt8) {
            scale_products(scores, key_scales, work_.query_scales[row], kKeys);
            key_scales = nullptr;
        }
        softmax_.modify(where, scores, key, n, key_scales);
        if (work_.sequence.tiles) work_.hide_pairs(where, scores, key, n);
        if (piece.full) return;
        const TileRange& mask = work_.sequence.mask;
        const int64_t begin = smaller(mask.row_begin(where.token) - key, kKeys);
        const int64_t end = larger(smaller(mask.row_end(where.token) - key, n), 0);
        for (int64_t j = 0; j < begin; ++j) scores[j] = -kInfinity;
        for (int64_t j = end; j < kKeys; ++j) scores[j] = -kInfinity;
    }

    // Factors of weights that depend on the row or the key; null if there are none.
    const float* value_scales(int64_t row, const Piece& piece) const {
        if (work_.head.value_scales) return work_.head.value_scales + key_of(piece);
        return dropout_.drops() ? factors_ + (row - piece.row) * kPanel + piece.part : nullptr;
    }

    // Draws the factors of a whole panel, as its counters serve it, when the first of its parts is weighed.
    void draw(const Piece& piece) {
        const int64_t panel_key = key_of(piece) - piece.part;
        if (panel_key == drawn_key_ && piece.row == drawn_row_) return;
        drawn_key_ = panel_key, drawn_row_ = piece.row;
        for (int64_t row = piece.row; row < past_last_row(piece); ++row)
            dropout_factors(dropout_, work_.sequence.batch, work_.at(row), panel_key, kPanel,
                            factors_ + (row - piece.row) * kPanel);
    }

    // Weights of a row from `column` on.
    Weight* weights(int64_t row, int64_t column) const {
        return reinterpret_cast<Weight*>(work_.scores + row * kScoreStride) + column;
    }

    // Memory of a row of a piece.
    struct RowOfPiece {
        float *scores, *sum;
        Weight* weights;
        int64_t column;

        void step() {
            scores += kKeys;
            sum += Vec::kWidth;
            weights += kScoreStride * static_cast<int64_t>(sizeof(float) / sizeof(Weight));
        }
    };

    RowOfPiece row_of(const Piece& piece, int64_t row) {
        const int64_t column = column_of(piece);
        return {scores_ + (row - piece.row) * kKeys, work_.row_sum + row * Vec::kWidth, weights(row, column), column};
    }

    // scales: of the weights, after they have been summed up.
    template <bool kScaled>
    __attribute__((always_inline)) void weigh_row(int64_t row, const RowOfPiece& at, const float* scales) {
        const Vec first = load(at.scores), second = load(at.scores + Vec::kWidth);
        const Vec highest = maximum(first, second);
        if (__builtin_expect(any_greater(highest, broadcast(limit_[row])), false)) raise(row, reduce_max(highest), at.column);
        const Vec reference = broadcast(reference_[row]);
        Vec p = softmax_.units().template weight<Unit::kElements == 1>(first, reference);
        Vec q = softmax_.units().template weight<Unit::kElements == 1>(second, reference);
        store(at.sum, load(at.sum) + (p + q));
        if (kScaled) {
            p = p * load(scales);
            q = q * load(scales + Vec::kWidth);
        }
        store_two(at.weights, p, q);
    }

    // Sets what weights of a row are relative to. A row that has seen no key has the reference 0, see ScoreUnits.
    void refer(int64_t row, float score) {
        work_.row_max[row] = score;
        reference_[row] = score < -kLargest ? 0.0f : score;
        limit_[row] = score + margin_;
    }

    // Makes `highest` the reference of a row, and rescales what it has accumulated and its weights before `column`.
    __attribute__((noinline)) void raise(int64_t row, float highest, int64_t column) {
        const float old = work_.row_max[row];
        refer(row, highest);
        if (old == -kInfinity) return;  // all weights are 0
        const float factor = softmax_.units().rescaling(old, highest);
        RowSoftmax<Unit>::rescale(work_.running(row), factor);
        Weight* of_row = weights(row, 0);
        for (int64_t j = 0; j < column; j += Vec::kWidth) store(of_row + j, load(of_row + j) * broadcast(factor));
    }

    TileWork& work_;
    const RowSoftmax<Unit> softmax_;
    const Dropout dropout_;
    const float margin_;   // in the unit of scores
    const bool modifies_;  // whether scores or weights need more than the mask
    RowsRange<long long> seen_[kRoomForRows / kRows + 1];
    float reference_[kRoomForRows], limit_[kRoomForRows];
    int64_t drawn_key_ = -1, drawn_row_ = -1;
    alignas(64) float scores_[kRows * kKeys];
    alignas(64) float factors_[kRows * kPanel];  // with dropout
};

}  // namespace FA_NAMESPACE
