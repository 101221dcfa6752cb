// The two products of a latent decode (decode_latent.hpp).
#pragma once

namespace FA_NAMESPACE {

// Keys of a block. Results are read and written once a block, which limits tiles of AMX with few keys.
template <class Unit>
constexpr int64_t kLatentKeys = kMultipliesTiles<Unit> ? 256
                                : Vec::kWidth == 16    ? 64
                                                       : 32;
static constexpr int64_t kLatentStep = 32;  // keys of a product are a multiple of this

// Rows whose queries, scores and weights are side by side. If all rows were, whole powers of two would separate keys, and
// the L1 cache would keep few of them.
static constexpr int64_t kLatentPanel = 2 * Vec::kWidth;
// The place of a row in panels with as many keys or units.
FA_INLINE int64_t in_panels(int64_t row, int64_t depth) {
    return row / kLatentPanel * kLatentPanel * depth + row % kLatentPanel;
}

// Prefetches rows, a cache line at a time.
class NextRows {
public:
    // bytes: length of a row.
    NextRows(char* const* rows, int64_t n, int64_t bytes)
        : at_(rows[0]), end_(at_ + bytes), next_(rows + 1), bytes_(bytes), left_(n) {}

    __attribute__((always_inline)) void prefetch_line() {
        if (left_ == 0) return;
        prefetch(at_);
        at_ += 64;
        if (at_ < end_) return;
        if (--left_ == 0) return;
        at_ = *next_++;
        end_ = at_ + bytes_;
    }

    int64_t lines() const { return (bytes_ + 63) / 64 * left_; }

private:
    const char *at_, *end_;
    char* const* next_;
    const int64_t bytes_;
    int64_t left_;
};

// Called once per step of a product: prefetches a line, or several lines, of the next block.
struct FetchLine {
    NextRows* rows;
    __attribute__((always_inline)) void fetch(const void*, int64_t) const { rows->prefetch_line(); }
};
struct FetchLines {
    NextRows* rows;
    int64_t lines;
    __attribute__((always_inline)) void fetch(const void*, int64_t) const {
        for (int64_t i = 0; i < lines; ++i) rows->prefetch_line();
    }
};

// C += A^T B: A is (depth, rows) with `a_stride` floats from one of its rows to the next; see multiply_tile for the rest.
template <class Unit, int kRowCount, int kUsed, class Fetch>
FA_INLINE void multiply_columns_tile(const float* a, int64_t a_stride, const float* b, int64_t b_stride, int64_t depth,
                                     float* c, int64_t c_stride, Fetch ahead) {
    Vec acc[kRowCount][kUsed];
#pragma GCC unroll 8
    for (int i = 0; i < kRowCount; ++i)
#pragma GCC unroll 2
        for (int j = 0; j < kUsed; ++j) acc[i][j] = load(c + i * c_stride + j * Vec::kWidth);
    for (int64_t k = 0; k < depth; ++k) {
        ahead.fetch(b, 0);
        Vec columns[kUsed];
#pragma GCC unroll 2
        for (int j = 0; j < kUsed; ++j) columns[j] = load(b + k * b_stride + j * Vec::kWidth);
#pragma GCC unroll 8
        for (int i = 0; i < kRowCount; ++i) {
            const Vec row = broadcast(a[k * a_stride + i]);
#pragma GCC unroll 2
            for (int j = 0; j < kUsed; ++j) acc[i][j] = Unit::multiply_add(acc[i][j], row, columns[j]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < kRowCount; ++i)
#pragma GCC unroll 2
        for (int j = 0; j < kUsed; ++j) store(c + i * c_stride + j * Vec::kWidth, acc[i][j]);
}

// The two products of a unit. `rows` is a multiple of the vector width, up to kLatentRows.
template <class Unit>
struct LatentProducts {
    // The number of keys or rows that fill the registers together with two vectors of rows or columns; twice that with one.
    static constexpr int kStep = Vec::kRegisters == 32 ? 8 : 4;
    static constexpr int64_t kUnits = kLatentKeys<Unit> / Unit::kElements;

    // scores (panels, keys, kLatentPanel) = keys (keys, units) x queries (panels, units, kLatentPanel)
    static void score(const float* keys, int64_t key_stride, int64_t num_keys, const float* queries, int64_t units,
                      float* scores, int64_t rows, NextRows& next) {
        const FetchLine ahead = {&next};
        int64_t row = 0;
        for (; row + kLatentPanel <= rows; row += kLatentPanel)
            for (int64_t j = 0; j < num_keys; j += kStep)
                multiply_tile<Unit, kStep, 2, false>(
                    keys + j * key_stride, key_stride, queries + in_panels(row, units), kLatentPanel, units,
                    scores + in_panels(row, kLatentKeys<Unit>) + j * kLatentPanel, kLatentPanel, ahead);
        if (row < rows)
            for (int64_t j = 0; j < num_keys; j += 2 * kStep)
                multiply_tile<Unit, 2 * kStep, 1, false>(
                    keys + j * key_stride, key_stride, queries + in_panels(row, units), kLatentPanel, units,
                    scores + in_panels(row, kLatentKeys<Unit>) + j * kLatentPanel, kLatentPanel, ahead);
    }

    // acc_o (rows, columns) += weights (panels, units, kLatentPanel)^T x values (units, columns)
    static void accumulate(const float* weights, const float* values, int64_t value_stride, int64_t units, float* acc_o,
                           int64_t acc_stride, int64_t rows, int64_t columns, NextRows& next) {
        const FetchLine ahead = {&next};
        for (int64_t c = 0; c < columns; c += 2 * Vec::kWidth)
            for (int64_t row = 0; row < rows; row += kStep) {
                const float* of_row = weights + in_panels(row, kUnits);
                float* to = acc_o + row * acc_stride + c;
                if (c + Vec::kWidth < columns) {
                    multiply_columns_tile<Unit, kStep, 2>(of_row, kLatentPanel, values + c, value_stride, units, to,
                                                          acc_stride, ahead);
                } else {
                    multiply_columns_tile<Unit, kStep, 1>(of_row, kLatentPanel, values + c, value_stride, units, to,
                                                          acc_stride, ahead);
                }
            }
    }

#ifdef FA_HAS_BF16_DOT
    // Stores the weights of a pair of keys, for a vector of rows.
    FA_INLINE void store_weights(float* weights, int64_t pair, int64_t row, Vec pairs) {
        store(weights + in_panels(row, kUnits) + pair * kLatentPanel, pairs);
    }
    FA_INLINE void finish_weights(float*, int64_t, int64_t) {}
#endif
};

#ifdef FA_HAS_MATRICES
template <>
struct LatentProducts<MatrixPair> : LatentProducts<Bfloat16Pair> {};
#endif

}  // namespace FA_NAMESPACE
