// Scores of an indexer: for each query and key, the weighted sum over heads of the positive parts of their products.
#pragma once

namespace FA_NAMESPACE {

// Copies a row as operands: as floats, or pairs of bfloat16 as they are.
template <class Element, class Unit>
FA_INLINE void copy_as_units(const Element* from, float* to, int64_t n, int64_t units) {
    if constexpr (Unit::kElements == 1) {
        widen_row(from, to, n, units);
    } else {
        static_assert(sizeof(Element) * Unit::kElements == sizeof(float));
        memcpy(to, from, n * sizeof(Element));
        memset(reinterpret_cast<Element*>(to) + n, 0, (units * Unit::kElements - n) * sizeof(Element));
    }
}

template <class Element, class Unit>
class IndexerScores {
public:
    IndexerScores(const FaIndexerParams& p, const IndexerTask& task, float* scratch)
        : p_(p),
          task_(task),
          layout_(p),
          queries_(scratch),
          keys_(queries_ + layout_.queries),
          rows_(keys_ + layout_.keys),
          products_(rows_ + layout_.rows) {}

    static int64_t scratch_floats(const FaIndexerParams& p) { return Layout(p).total; }

    void run() const {
        pack_queries();
        Unit{}.begin();
        for (int64_t key = task_.first_key; key < task_.end_key; key += kPanel) {
            pack_keys(key);
            for (int64_t row = 0; row < task_.num_rows; ++row) {
                multiply_panel<false>(Unit{}, queries_ + row * layout_.padded_heads * layout_.query_stride,
                                      layout_.query_stride, keys_, kPanel, layout_.units, products_, kProductStride,
                                      layout_.padded_heads, kPanel);
                add_heads(row, key);
            }
        }
        Unit{}.end();
    }

private:
    static constexpr int64_t kProductStride = kPanel + kRowPadding;

    struct Layout {
        explicit Layout(const FaIndexerParams& p)
            : units(round_up((p.headdim + Unit::kElements - 1) / Unit::kElements, larger(Unit::kDepthStep, Vec::kWidth))),
              query_stride(units + kRowPadding),
              padded_heads(round_up(p.nheads, Unit::kRowStep)),
              queries(kIndexerRows * padded_heads * query_stride),
              keys(units * kPanel),
              rows(kPanel * query_stride),
              total(queries + keys + rows + padded_heads * kProductStride) {}

        int64_t units;  // of a query or key
        int64_t query_stride, padded_heads;
        int64_t queries, keys, rows, total;  // floats
    };

    void pack_queries() const {
        for (int64_t row = 0; row < task_.num_rows; ++row)
            for (int64_t head = 0; head < layout_.padded_heads; ++head) {
                float* to = queries_ + (row * layout_.padded_heads + head) * layout_.query_stride;
                const int64_t at = (task_.first_row + row) * p_.q_stride_row + head * p_.q_stride_head;
                if (head < p_.nheads) {
                    copy_as_units<Element, Unit>(static_cast<const Element*>(p_.q) + at, to, p_.headdim, layout_.units);
                } else {
                    memset(to, 0, layout_.units * sizeof(float));
                }
            }
    }

    // Keys of a panel become its columns. Those behind the task's last one are zeros.
    void pack_keys(int64_t first) const {
        const int64_t n = smaller(kPanel, task_.end_key - first);
        for (int64_t i = 0; i < kPanel; ++i) {
            float* to = rows_ + i * layout_.query_stride;
            if (i < n) {
                copy_as_units<Element, Unit>(key_at(first + i), to, p_.headdim, layout_.units);
            } else {
                memset(to, 0, layout_.units * sizeof(float));
            }
        }
        transpose_units(rows_, layout_.query_stride, keys_, kPanel, kPanel, layout_.units);
    }

    const Element* key_at(int64_t key) const {
        int64_t row = task_.sequence;
        if (p_.block_table) {
            row = p_.block_table[task_.sequence * p_.block_table_stride + key / p_.k_seqlen];
            key %= p_.k_seqlen;
        } else if (p_.cu_seqlens_k) {
            row = 0;
            key += p_.cu_seqlens_k[task_.sequence];
        }
        return static_cast<const Element*>(p_.k) + row * p_.k_stride_batch + key * p_.k_stride_row;
    }

    void add_heads(int64_t row, int64_t first_key) const {
        const float* weights = p_.weights + (task_.first_row + row) * p_.weights_stride_row;
        float* to = task_.scores + row * task_.stride + first_key;
        const int64_t n = smaller(kPanel, task_.end_key - first_key);
        for (int64_t column = 0; column < n; column += Vec::kWidth) {
            Vec sum = zero();
            for (int64_t head = 0; head < p_.nheads; ++head) {
                const Vec product = load(products_ + head * kProductStride + column);
                sum = fma(broadcast(weights[head]), maximum(zero(), product), sum);  // in this order a NaN is kept
            }
            if (column + Vec::kWidth <= n) {
                store(to + column, sum);
            } else {
                store_partial(to + column, sum, static_cast<int>(n - column));
            }
        }
    }

    const FaIndexerParams& p_;
    const IndexerTask& task_;
    const Layout layout_;
    float* const queries_;
    float* const keys_;
    float* const rows_;
    float* const products_;
};

}  // namespace FA_NAMESPACE
