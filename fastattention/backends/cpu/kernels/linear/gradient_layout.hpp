// The working memory of gradients of linear attention.
#pragma once

namespace FA_NAMESPACE {

// The buffers that gradients need beside those of a chunk, in floats from the beginning of the working memory.
template <class Unit>
struct GradientLayout : LinearLayout<Unit> {
    using Base = LinearLayout<Unit>;
    static constexpr int64_t kSquareRows = kPartTileRows;  // that a tile may extend past a square

    int64_t rows;  // tokens that ask: those of delta rules twice
    int64_t key_vectors;  // headdim_k in whole vectors
    int64_t value_depth;  // columns of values, padded as the depth of a product
    int64_t state_gradient, turned_state, row_gradients, updates, score_gradients, turned_scores, square, asking_gradients;
    int64_t key_gradients, turned_asking, gate_gradients, token_sums, raw, carried, ends, kept_states, kept_updates;

    GradientLayout(const FaLinearParams& p, int64_t num_tokens) : Base(p, p.headdim_v, 1) {
        const int64_t n = this->chunk, columns = round_up(p.headdim_v, Vec::kWidth);
        rows = (p.overwrites ? 2 : 1) * n;
        key_vectors = round_up(p.headdim_k, Vec::kWidth);
        value_depth = round_up(columns, common_multiple(Vec::kWidth, Base::kDepthStep));
        const int64_t turned_rows = larger(this->key_rows, key_vectors), padded_rows = rows + kSquareRows;
        int64_t at = this->total;
        const auto take = [&](int64_t floats) {
            const int64_t here = at;
            at += round_up(floats, kRowPadding);
            return here;
        };
        state_gradient = take(this->state_floats);
        turned_state = take(value_depth * larger(this->key_stride, n));
        row_gradients = take(padded_rows * this->value_stride);
        updates = take((n + FloatUnit::kRowStep) * this->value_stride);
        score_gradients = take(padded_rows * n);
        turned_scores = take((n + kSquareRows) * rows);
        square = take((n + kSquareRows) * n);
        asking_gradients = take(padded_rows * this->key_stride);
        key_gradients = take((n + kSquareRows) * this->key_stride);
        turned_asking = take(turned_rows * rows);
        gate_gradients = take(n * (p.gate_per_key ? this->key_stride : 1));
        token_sums = take(4 * n);
        raw = take(p.gate_per_key ? 2 * n * this->key_stride : 0);
        carried = take(p.gate_per_key ? padded_rows * this->key_stride : 0);
        ends = take(p.gate_per_key ? n * this->key_stride : n * n);
        // Pairs of operands: larger ones than of the chunk itself.
        constexpr bool kPairs = Base::kPairs;
        const int64_t depth = larger(larger(value_depth, this->key_depth), rows);
        this->left = take(kPairs ? larger(rows, turned_rows) * (depth / 2 + kRowPadding) : 0);
        this->right = take(kPairs ? depth / 2 * larger(larger(this->value_stride, this->key_stride), n) : 0);
        const int64_t chunks = (num_tokens + n - 1) / n;
        kept_states = take((chunks + 1) * this->state_floats);
        kept_updates = take(p.overwrites ? chunks * n * this->value_stride : 0);
        this->total = at;
    }
};

}  // namespace FA_NAMESPACE
