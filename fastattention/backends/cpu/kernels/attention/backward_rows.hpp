// Packs the rows of a tile for a backward (backward.hpp): queries and gradients of results as units, also transposed, and
// what turns scores into weights and their gradients.
#pragma once

namespace FA_NAMESPACE {

// Interleaves adjacent rows of `columns` elements: `to` becomes (rows / 2, columns) of pairs.
FA_INLINE void pair_rows(const float* from, int64_t from_stride, float* to, int64_t to_stride, int64_t rows,
                         int64_t columns) {
    for (int64_t i = 0; i < rows; i += 2) {
        const auto* first = reinterpret_cast<const Bfloat16*>(from + i * from_stride);
        const auto* second = reinterpret_cast<const Bfloat16*>(from + (i + 1) * from_stride);
        pair_row(first, second, to + i / 2 * to_stride, columns);
    }
}

template <class Element, class Unit>
class RowPacker {
public:
    RowPacker(const Call& call, const FaGradients& gradients, const BackwardHead& head, int64_t tile)
        : call_(call),
          p_(*call.params),
          gradients_(gradients),
          head_(head),
          sequence_(call.sequences[head.sequence]),
          layout_(p_),
          tile_(tile),
          rows_(call.tile(sequence_, tile, rows_of_tile<Unit>(p_))),
          at_(head.tiles + tile * layout_.tile_floats()) {}

    void run() {
        float* stats = at_ + layout_.stats();
        for (int64_t row = 0; row < layout_.rows; ++row) {
            float* query = at_ + layout_.queries() + row * layout_.query_stride;
            float* grad = at_ + layout_.grads() + row * layout_.value_stride;
            if (row < rows_.count) {
                const QueryRow where = row_at(row);
                load_query<Element>(call_, sequence_, where, query, layout_.query_columns);
                const float delta = load_grad(where, grad);
                measure_row(where, delta, stats + row);
            } else {
                memset(query, 0, layout_.query_columns * sizeof(float));
                memset(grad, 0, layout_.value_columns * sizeof(float));
                stats[row] = kInfinity;
                stats[row + layout_.rows] = stats[row + 2 * layout_.rows] = 0.0f;
            }
            if constexpr (Unit::kElements == 2) {  // in place: writes never overtake reads
                narrow_row(query, reinterpret_cast<Bfloat16*>(query), layout_.query_columns);
                narrow_row(grad, reinterpret_cast<Bfloat16*>(grad), layout_.value_columns);
            }
        }
        transpose(layout_.queries(), layout_.query_stride, layout_.queries_t(), layout_.query_columns, layout_.query_rows);
        transpose(layout_.grads(), layout_.value_stride, layout_.grads_t(), layout_.value_columns, layout_.value_rows);
        if (head_.grad_sinks) add_sinks(stats);
        if (gradients_.grad_q) clear_unseen();
    }

private:
    QueryRow row_at(int64_t row) const { return query_row(call_, head_.kv_head, rows_, row); }

    // The offset of a row of the result, in elements from the first one.
    int64_t out_offset(QueryRow where) const {
        const int64_t first = (sequence_.out - static_cast<const char*>(p_.out)) / call_.element_size;
        return first + where.token * p_.out_stride_row + where.head * p_.out_stride_head;
    }

    // Loads the gradient of a row of the result as floats; returns its product with the result.
    float load_grad(QueryRow where, float* grad) const {
        const int64_t offset = out_offset(where);
        float out[kMaxHeaddimV + 2 * Vec::kWidth];
        widen_row(static_cast<const Element*>(gradients_.grad_out) + offset, grad, p_.headdim_v, layout_.value_columns);
        widen_row(static_cast<const Element*>(p_.out) + offset, out, p_.headdim_v, round_up(p_.headdim_v, Vec::kWidth));
        Vec sum = zero();
        for (int64_t c = 0; c < p_.headdim_v; c += Vec::kWidth) sum = fma(load(grad + c), load(out + c), sum);
        return reduce_add(sum);
    }

    void measure_row(QueryRow where, float delta, float* stats) const {
        const int64_t at = sequence_.lse - p_.lse + where.head * p_.lse_stride_head + where.token;
        const float lse = p_.lse[at];
        if (gradients_.grad_lse && lse != -kInfinity) delta -= gradients_.grad_lse[at];
        const float magnitude = lse < 0.0f ? -lse : lse;
        const bool coarse = magnitude > kLargestPlainLse && magnitude < kInfinity;
        stats[0] = lse == -kInfinity ? kInfinity : lse;
        stats[layout_.rows] = delta;
        stats[2 * layout_.rows] = coarse && sequence_.bias ? share(where, lse) : 1.0f;
        // Products of the backward are summed in another order. As many last bits below lse, a score is the highest.
        if (coarse && !sequence_.bias) stats[0] -= magnitude * 1e-6f;
    }

    // Beyond this, lse is too coarse to tell how many keys share a row: its last bit is 8, more than the log of any count.
    static constexpr float kLargestPlainLse = 1e8f;

    // The weight of a key in a row whose scores are all near the lowest float, as additive masks make them. Only the bias is
    // used: products vanish beside it.
    float share(QueryRow where, float lse) const {
        const ScoreRow row = score_row(call_, sequence_, where.token, where.head);
        const int64_t begin = sequence_.mask.row_begin(where.token), end = sequence_.mask.row_end(where.token);
        const BlockRow blocks = call_.block_row(sequence_, where.token, where.head);
        float sum = 0.0f;
        for (int64_t key = begin; key < end; ++key) {
            if (!blocks.keeps(key) || blocks.hides(key)) continue;
            float bias[Vec::kWidth];
            store(bias, bias_of(row, key, 1));
            sum += exp2((bias[0] - lse) * kLog2E);
        }
        return sum > 0.0f ? 1.0f / sum : 1.0f;
    }

    // Transposes a tile into `to`, with elements first and zeros after the last element.
    void transpose(int64_t from, int64_t from_stride, int64_t to, int64_t columns, int64_t rows_of_result) const {
        const int64_t stride = layout_.row_stride, units = layout_.rows / Unit::kElements;
        float* result = at_ + to;
        if constexpr (Unit::kElements == 2) {
            float pairs[Vec::kWidth * (kMaxHeaddim + kRowPadding)];
            for (int64_t unit = 0; unit < units; unit += Vec::kWidth) {
                pair_rows(at_ + from + 2 * unit * from_stride, from_stride, pairs, columns, 2 * Vec::kWidth, columns);
                transpose_units(pairs, columns, result + unit, stride, Vec::kWidth, columns);
            }
        } else {
            transpose_units(at_ + from, from_stride, result, stride, units, columns);
        }
        for (int64_t row = columns; row < rows_of_result; ++row) memset(result + row * stride, 0, units * sizeof(float));
    }

    // A sink is a key whose value is zero, so the gradient of its score is -p delta.
    void add_sinks(const float* stats) const {
        float* sums = head_.grad_sinks + tile_ * call_.group_size;
        for (int64_t i = 0; i < call_.group_size; ++i) sums[i] = 0.0f;
        for (int64_t row = 0; row < rows_.count; ++row) {
            const QueryRow where = row_at(row);
            const float lse = stats[row], sink = p_.sinks[where.head];
            if (lse == kInfinity) continue;
            const float weight = sink < lse ? exp2((sink - lse) * kLog2E) : 1.0f;
            sums[where.head % call_.group_size] -= weight * stats[row + layout_.rows];
        }
    }

    // Clears the gradients of queries if the tile sees no key, as no chunk writes them.
    void clear_unseen() const {
        const QueryRow first = row_at(0);
        const auto seen = sequence_.mask.rows(first.token, row_at(rows_.count - 1).token);
        const BlockRow blocks = call_.block_row(sequence_, first.token, first.head);
        if (blocks.next(seen.seen_begin, seen.seen_end) < seen.seen_end) return;
        for (int64_t row = 0; row < rows_.count; ++row) {
            const QueryRow where = row_at(row);
            const int64_t at = ((head_.first_query + where.token) * p_.nheads + where.head) * p_.headdim;
            memset(static_cast<Element*>(gradients_.grad_q) + at, 0, p_.headdim * sizeof(Element));
        }
    }

    const Call& call_;
    const FaAttentionParams& p_;
    const FaGradients& gradients_;
    const BackwardHead& head_;
    const Sequence& sequence_;
    const BackwardLayout<Unit> layout_;
    const int64_t tile_;
    const RowTile rows_;
    float* const at_;
};

}  // namespace FA_NAMESPACE
