// Decode from a cache in interleaved panels: few query rows against panels of keys and values in place.
//
// A vector of units has the same head dimensions of neighbouring keys. So scores need no sums across a vector, and the
// scores of a row are contiguous, as in prefill. Queries are multiplied with a panel of keys, the softmax runs row by row,
// and weights are multiplied with the values. Both products read memory in order, and prefetch the next part of it.
#pragma once

namespace FA_NAMESPACE {

// How a unit multiplies few rows:
//   kMostRows  rows at a time
//   begin      called before a sequence of products, with the number of rows and the units of a key; Unit::end ends it
template <class Unit>
struct FewRows {
    static constexpr int64_t kMostRows = 8;
    FA_INLINE void begin(int64_t, int64_t) {}
};

// Neighbouring vectors of C, a power of two: together with the operands of B and a broadcast they fill the registers.
template <class Unit>
constexpr int vectors_of_rows(int rows) {
    int vectors = 8;
    while (vectors > 1 && vectors * (rows + Unit::kOperands) >= Vec::kRegisters) vectors /= 2;
    return vectors;
}

template <class Unit, int kRowCount, int kUsed = vectors_of_rows<Unit>(kRowCount)>
static void multiply_few(const float* a, int64_t a_stride, const typename Unit::Stored* b, int64_t b_stride, int64_t depth,
                         float* c, int64_t c_stride, int64_t columns, FetchAhead ahead) {
    int64_t j = 0;
    for (; j + kUsed * Vec::kWidth <= columns; j += kUsed * Vec::kWidth)
        multiply_tile<Unit, kRowCount, kUsed, true>(a, a_stride, b + j, b_stride, depth, c + j, c_stride, ahead);
    if constexpr (kUsed > 1) {
        if (j < columns)
            multiply_few<Unit, kRowCount, kUsed / 2>(a, a_stride, b + j, b_stride, depth, c + j, c_stride, columns - j,
                                                     ahead);
    }
}

// C += A B for up to eight rows; A and C have room for eight. depth: in units of B; columns: a multiple of the vector width.
template <class Unit>
static void multiply_few_rows(Unit, const float* a, int64_t a_stride, const typename Unit::Stored* b, int64_t b_stride,
                              int64_t depth, float* c, int64_t c_stride, int64_t rows, int64_t columns, FetchAhead ahead) {
    if (rows == 1) return multiply_few<Unit, 1>(a, a_stride, b, b_stride, depth, c, c_stride, columns, ahead);
    if (rows == 2) return multiply_few<Unit, 2>(a, a_stride, b, b_stride, depth, c, c_stride, columns, ahead);
    if (rows <= 4) return multiply_few<Unit, 4>(a, a_stride, b, b_stride, depth, c, c_stride, columns, ahead);
    multiply_few<Unit, 8>(a, a_stride, b, b_stride, depth, c, c_stride, columns, ahead);
}

// Rows first_row ... first_row + num_rows - 1 of one split.
template <class Element, class Unit>
class PanelDecode {
public:
    PanelDecode(const Call& call, const DecodeSplit& split, int64_t first_row, int64_t num_rows)
        : call_(call),
          split_(split),
          sequence_(call.sequences[split.sequence]),
          cache_(call, sequence_, split.kv_head),
          softmax_(call, sequence_),
          first_row_(first_row),
          num_rows_(num_rows),
          query_stride_(cache_.key_units * Unit::kOperands),
          columns_(round_up(cache_.headdim_v, Vec::kWidth)) {
        memset(queries_, 0, kMostRows * query_stride_ * sizeof(float));
        memset(acc_o_, 0, kMostRows * columns_ * sizeof(float));
        memset(row_sum_, 0, sizeof(row_sum_));
        for (int64_t row = 0; row < num_rows_; ++row) {
            rows_[row] = query_row(call, split.kv_head, first_row + row);
            row_max_[row] = -kInfinity;
            load_row(row);
        }
    }

    void run() {
        FewRows<Unit>::begin(num_rows_, cache_.key_units);
        const TileRange& mask = sequence_.mask;
        const int64_t begin = larger(split_.key_begin, mask.row_begin(rows_[0].token));
        const int64_t end = smaller(split_.key_end, mask.row_end(rows_[num_rows_ - 1].token));
        for (int64_t key = begin / kCachePanel * kCachePanel; key < end; key += kCachePanel)
            attend(key, smaller(kCachePanel, end - key));
        Unit::end();
        finish();
    }

private:
    static constexpr int64_t kMostRows = FewRows<Unit>::kMostRows;
    static constexpr int64_t kElements = PanelCache<Element>::kElements;
    using Stored = typename PanelCache<Element>::Stored;
    // Bytes that are prefetched at a time: more or less is slower, and so is prefetching far ahead
    // (docs/decisions/0011-fetch-panels-in-short-turns.md).
    static constexpr int64_t kChunkBytes = sizeof(Element) == 4 ? 4096 : 8192;

    void load_row(int64_t row) {
        float wide[kMaxHeaddim + 2 * Vec::kWidth];
        const int64_t padded = cache_.key_units * kElements;
        load_query<Element>(call_, sequence_, rows_[row], wide, padded);
        float* to = queries_ + row * query_stride_;
        if constexpr (Unit::kElements == 2) {
            narrow_row(wide, reinterpret_cast<Bfloat16*>(to), padded);
        } else {
            memcpy(to, wide, padded * sizeof(float));
        }
    }

    // Attends to the first n keys of the panel that begins at `key`.
    void attend(int64_t key, int64_t n) {
        const Stored* values = cache_.value(key);
        memset(scores_, 0, sizeof(scores_));
        multiply(queries_, query_stride_, cache_.key(key), kCachePanel, cache_.key_units, scores_, kCachePanel, values);
        for (int64_t row = 0; row < num_rows_; ++row) {
            const int64_t token = rows_[row].token;
            const int64_t begin = larger(larger(sequence_.mask.row_begin(token), split_.key_begin) - key, 0);
            const int64_t end = smaller(sequence_.mask.row_end(token) - key, n);
            softmax_.update(rows_[row], scores_ + row * kCachePanel, key, begin, end, kCachePanel,
                            {&row_max_[row], row_sum_ + row * Vec::kWidth, acc_o_ + row * columns_, columns_});
        }
        const Stored* next = cache_.key(key + n);
        if (n < kCachePanel) {
            // Weights after the last key are 0, but values there must be 0 too: 0 times arbitrary memory might be NaN.
            cache_.copy_values(key, n, last_values_);
            values = next = last_values_;
        }
        multiply(scores_, kCachePanel, values, cache_.headdim_v, kCachePanel / kElements, acc_o_, columns_, next);
    }

    // C += A B, which reads the rows of B in the order of memory. next: what is read after B.
    void multiply(const float* a, int64_t a_stride, const Stored* b, int64_t b_columns, int64_t depth, float* c,
                  int64_t c_columns, const Stored* next) {
        const int64_t fitting = kChunkBytes / (b_columns * static_cast<int64_t>(sizeof(Stored)));
        const int64_t step = larger(fitting / Unit::kDepthStep, 1) * Unit::kDepthStep;
        for (int64_t k = 0; k < depth; k += step) {
            const Stored* values_now = b + k * b_columns;
            const Stored* after = k + step < depth ? values_now + step * b_columns : next;
            const FetchAhead ahead = {reinterpret_cast<const char*>(after) - reinterpret_cast<const char*>(values_now)};
            multiply_few_rows(Unit{}, a + k * Unit::kOperands, a_stride, values_now, b_columns, smaller(step, depth - k), c,
                              c_columns, num_rows_, c_columns, ahead);
        }
    }

    void finish() {
        for (int64_t row = 0; row < num_rows_; ++row) {
            split_.row_max[first_row_ + row] = row_max_[row];
            split_.row_sum[first_row_ + row] = reduce_add(load(row_sum_ + row * Vec::kWidth));
            memcpy(split_.acc_o + (first_row_ + row) * columns_, acc_o_ + row * columns_, columns_ * sizeof(float));
        }
    }

    const Call& call_;
    const DecodeSplit& split_;
    const Sequence& sequence_;
    const PanelCache<Element> cache_;
    const RowSoftmax<Unit> softmax_;
    const int64_t first_row_, num_rows_, query_stride_, columns_;
    QueryRow rows_[kMostRows];
    float row_max_[kMostRows];
    float row_sum_[kMostRows * Vec::kWidth];
    alignas(64) float queries_[kMostRows * (kMaxHeaddim + 1)];
    alignas(64) float scores_[kMostRows * kCachePanel];
    alignas(64) float acc_o_[kMostRows * kMaxHeaddimV];
    // Padded, as whole vectors are read.
    alignas(64) Stored last_values_[kCachePanel * kMaxHeaddimV / kElements + Vec::kWidth];
};

template <class Element, class Unit>
static void decode_panel_split(const Call& call, const DecodeSplit& split) {
    const int64_t rows = call.rows(call.sequences[split.sequence]);
    for (int64_t row = 0; row < rows; row += FewRows<Unit>::kMostRows)
        PanelDecode<Element, Unit>(call, split, row, smaller(FewRows<Unit>::kMostRows, rows - row)).run();
}

}  // namespace FA_NAMESPACE
