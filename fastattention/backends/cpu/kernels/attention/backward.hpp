// The backward of attention: gradients of queries, keys and values from that of the result.
//
//     p   = exp(s - lse)                  the weights, recomputed from the forward's lse
//     dv += p^T do      dp = do v^T
//     ds  = p * (dp - delta)              delta = sum(do * o) - dlse, one value a row
//     dq += ds k        dk += ds^T q      both times softmax_scale at the end
//
// (FlashAttention-2, arXiv 2307.08691, algorithm 2; the gradient of lse is part of delta because dlse/ds = p.) A task is a
// chunk of keys, whose gradients stay with its thread. They are transposed, so that all five products read operands in the
// layout in which they were written. Chunks add to a tile's gradient of q in a fixed order, so results are deterministic.
#pragma once

namespace FA_NAMESPACE {

template <class Element, class Unit>
class BackwardChunk {
public:
    BackwardChunk(const Call& call, const FaGradients& gradients, const BackwardHead& head, int64_t chunk, float* scratch)
        : call_(call),
          p_(*call.params),
          gradients_(gradients),
          head_(head),
          sequence_(call.sequences[head.sequence]),
          chunk_(chunk),
          work_(work_of(call, head, chunk, scratch)),
          keys_(work_.values_t + layout_.keys * layout_.value_units),
          grad_k_(keys_ + layout_.keys * layout_.key_stride),
          grad_v_(grad_k_ + layout_.query_rows * layout_.score_stride),
          scores_(work_) {}

    void run() {
        Unit::begin();
        pack();
        memset(grad_k_, 0, layout_.query_rows * layout_.score_stride * sizeof(float));
        memset(grad_v_, 0, layout_.value_rows * layout_.score_stride * sizeof(float));
        const int64_t size = rows_of_tile<Unit>(p_), tiles = call_.num_tiles(sequence_, size);
        for (int64_t tile = 0; tile < tiles; ++tile) visit(tile, call_.tile(sequence_, tile, size));
        Unit::end();
        if (gradients_.grad_k)
            write(grad_k_, p_.headdim, layout_.query_columns, static_cast<float>(p_.softmax_scale), gradients_.grad_k);
        if (gradients_.grad_v) write(grad_v_, p_.headdim_v, layout_.value_columns, 1.0f, gradients_.grad_v);
    }

private:
    using Seen = RowsRange<long long>;

    static ChunkWork<Unit> work_of(const Call& call, const BackwardHead& head, int64_t chunk, float* scratch) {
        const Sequence& sequence = call.sequences[head.sequence];
        const BackwardLayout<Unit> l(*call.params);
        const int64_t first = chunk * l.keys;
        float* values_t = scratch + l.keys * l.query_units;
        const int64_t gradients = (l.query_rows + l.value_rows) * l.score_stride;
        float* weights = values_t + l.keys * l.value_units + l.keys * l.key_stride + gradients;
        float* grad_s = weights + l.weight_floats();
        return {call,
                sequence,
                l,
                head.kv_head,
                first,
                smaller(l.keys, sequence.mask.seqlen_k - first),
                scratch,
                values_t,
                weights,
                grad_s,
                Unit::kElements == 1 ? grad_s : grad_s + l.weight_floats()};
    }

    // Packs keys and values with elements first, in panels, and keys also in rows. Zeros follow the last key.
    void pack() {
        pack(call_.keys(sequence_, head_.kv_head), p_.headdim, layout_.query_columns, layout_.query_units, work_.keys_t,
             keys_);
        pack(call_.values(sequence_, head_.kv_head), p_.headdim_v, layout_.value_columns, layout_.value_units, work_.values_t,
             nullptr);
    }

    void pack(const Rows& rows, int64_t n, int64_t columns, int64_t units, float* panels, float* as_they_are) const {
        char* addresses[kMostChunkKeys];
        rows.addresses(work_.first_key, work_.num_keys, addresses);
        float block[Vec::kWidth * kBlockStride];
        for (int64_t first = 0; first < layout_.keys; first += Vec::kWidth) {
            for (int64_t j = first; j < first + Vec::kWidth; ++j)
                load_units(j < work_.num_keys ? addresses[j] : nullptr, n, columns, block + (j - first) * kBlockStride);
            if (as_they_are) {
                float* to = as_they_are + first / Unit::kElements * layout_.key_stride;
                if constexpr (Unit::kElements == 2) {
                    pair_rows(block, kBlockStride, to, layout_.key_stride, Vec::kWidth, columns);
                } else {
                    for (int64_t j = 0; j < Vec::kWidth; ++j)
                        memcpy(to + j * layout_.key_stride, block + j * kBlockStride, columns * sizeof(float));
                }
            }
            transpose_keys(block, panels + first / kPanel * kPanel * units + first % kPanel, units);
        }
    }

    // Loads a row as units, with zeros up to `padded` floats; only zeros for a null pointer.
    static void load_units(const char* from, int64_t n, int64_t padded, float* to) {
        if (from == nullptr) {
            memset(to, 0, padded * sizeof(float));
            return;
        }
        widen_row(reinterpret_cast<const Element*>(from), to, n, padded);
        if constexpr (Unit::kElements == 2) {
            narrow_row(to, reinterpret_cast<Bfloat16*>(to), padded);
            memset(to + padded / 2, 0, padded / 2 * sizeof(float));
        }
    }

    // Processes the keys of the chunk that the rows of a tile see: runs of keys, each in whole panels.
    void visit(int64_t tile, const RowTile& tile_rows) {
        const QueryRow first = work_.row_at(tile_rows, 0);
        const Seen seen = sequence_.mask.rows(first.token, work_.row_at(tile_rows, tile_rows.count - 1).token);
        const BlockRow blocks = call_.block_row(sequence_, first.token, first.head);
        const int64_t begin = larger(seen.seen_begin, work_.first_key);
        const int64_t end = smaller(seen.seen_end, work_.first_key + work_.num_keys);
        if (blocks.next(begin, end) >= end) return;
        const int64_t count = round_up(tile_rows.count, common_multiple(Unit::kRowStep, kDepth));
        const float* at = head_.tiles + tile * layout_.tile_floats();
        const PackedRows rows{tile_rows, count, at + layout_.queries(), at + layout_.grads(), at + layout_.stats()};
        for (int64_t row = 0; row < tile_rows.count; row += kStrip) {
            const int64_t last = smaller(row + kStrip, tile_rows.count) - 1;
            strips_[row / kStrip] =
                sequence_.mask.rows(work_.row_at(tile_rows, row).token, work_.row_at(tile_rows, last).token);
        }
        const auto for_each_run = [&](auto use) {
            KeyRuns runs(blocks, begin, end);
            while (runs.next(layout_.keys))
                use((runs.first() - work_.first_key) / kPanel * kPanel, round_up(runs.past_last() - work_.first_key, kPanel));
        };
        for_each_run([&](int64_t from, int64_t to) {
            scores_.run(rows, from, to, seen);
            if (gradients_.grad_v) accumulate(at + layout_.grads_t(), p_.headdim_v, work_.weights, grad_v_, from, to, count);
            if (gradients_.grad_k) accumulate(at + layout_.queries_t(), p_.headdim, work_.grad_s, grad_k_, from, to, count);
        });
        if (gradients_.grad_q) add_to_queries(tile, tile_rows, count, blocks, seen, for_each_run);
    }

    // result (elements, keys begin to end) += a (elements, units of rows) times b (units of rows, keys), for rows that see
    // keys of a panel.
    void accumulate(const float* a, int64_t elements, const float* b, float* result, int64_t begin, int64_t end,
                    int64_t rows) const {
        const int64_t count = round_up(elements, Unit::kRowStep);
        for (int64_t j = begin; j < end; j += kPanel) {
            int64_t first = 0, past_last = rows;
            while (first < past_last && !sees(first, j)) first += kStrip;
            while (first < past_last && !sees((past_last - 1) / kStrip * kStrip, j))
                past_last = (past_last - 1) / kStrip * kStrip;
            if (first >= past_last) continue;
            const int64_t unit = first / Unit::kElements, depth = (past_last - first) / Unit::kElements;
            multiply_panel<true>(Unit{}, a + unit, layout_.row_stride, b + unit * layout_.score_stride + j,
                                 layout_.score_stride, depth, result + j, layout_.score_stride, count, kPanel);
        }
    }

    // Whether a strip of rows sees keys of a panel.
    bool sees(int64_t row, int64_t panel) const {
        const int64_t key = work_.first_key + panel;
        return strips_[row / kStrip].classify(key, key + kPanel - 1) != TileKind::kSkipped;
    }

    // Waits until earlier chunks have added to the tile, adds to it, and writes it if no chunk follows.
    template <class ForEachRun>
    void add_to_queries(int64_t tile, const RowTile& tile_rows, int64_t rows, const BlockRow& blocks, const Seen& seen,
                        ForEachRun for_each_run) {
        float* grad_q = head_.grad_q + tile * layout_.rows * layout_.key_stride;
        // Whether earlier chunks have added to the tile.
        bool adds = blocks.next(seen.seen_begin, work_.first_key) < work_.first_key;
        if (adds) wait_for(head_.turn + tile, static_cast<int32_t>(chunk_));
        for_each_run([&](int64_t begin, int64_t end) {
            if (adds) {
                multiply_keys<true>(grad_q, rows, begin, end);
            } else {
                multiply_keys<false>(grad_q, rows, begin, end);
            }
            adds = true;
        });
        const int64_t next_key = blocks.next(work_.first_key + layout_.keys, seen.seen_end);
        if (next_key < seen.seen_end) {
            __atomic_store_n(head_.turn + tile, static_cast<int32_t>(next_key / layout_.keys), __ATOMIC_RELEASE);
            return;
        }
        for (int64_t row = 0; row < tile_rows.count; ++row) {
            const QueryRow where = work_.row_at(tile_rows, row);
            const int64_t at = ((head_.first_query + where.token) * p_.nheads + where.head) * p_.headdim;
            store_scaled(grad_q + row * layout_.key_stride, broadcast(static_cast<float>(p_.softmax_scale)),
                         static_cast<Element*>(gradients_.grad_q) + at, p_.headdim);
        }
    }

    // grad_q (rows, elements) = or += gradients of scores (rows, units of keys) times keys, strip by strip.
    template <bool kAccumulate>
    void multiply_keys(float* grad_q, int64_t rows, int64_t begin, int64_t end) const {
        const int64_t columns = round_up(p_.headdim, Vec::kWidth);
        for (int64_t c = 0; c < columns; c += kPanel)
            for (int64_t row = 0; row < rows; row += kStrip) {
                const Seen& seen = strips_[row / kStrip];
                const int64_t first = larger(begin, (seen.seen_begin - work_.first_key) / kDepth * kDepth);
                const int64_t past_last = smaller(end, round_up(seen.seen_end - work_.first_key, kDepth));
                const int64_t unit = first / Unit::kElements, depth = larger(past_last - first, 0) / Unit::kElements;
                multiply_panel<kAccumulate>(Unit{}, work_.grad_s_rows + row * layout_.grad_s_stride + unit,
                                            layout_.grad_s_stride, keys_ + unit * layout_.key_stride + c, layout_.key_stride,
                                            depth, grad_q + row * layout_.key_stride + c, layout_.key_stride,
                                            smaller(kStrip, rows - row), smaller(kPanel, columns - c));
            }
    }

    // Writes a gradient of the chunk's keys or values, transposed from elements first to rows.
    void write(const float* gradient, int64_t n, int64_t columns, float scale, void* to) const {
        float block[Vec::kWidth * kBlockStride];
        const int64_t end = round_up(work_.num_keys, ScoreGradients<Unit>::kOrdered);
        for (int64_t j = 0; j < end; j += Vec::kWidth) {
            transpose_units(gradient + j, layout_.score_stride, block, kBlockStride, columns, Vec::kWidth);
            for (int64_t k = 0; k < Vec::kWidth; ++k) {
                const int64_t key = ScoreGradients<Unit>::key_of(j + k);
                if (key >= work_.num_keys) continue;
                const int64_t token = head_.first_key + work_.first_key + key;
                store_scaled(block + k * kBlockStride, broadcast(scale),
                             static_cast<Element*>(to) + (token * p_.nheads_k + head_.kv_head) * n, n);
            }
        }
    }

    static constexpr int64_t kDepth = Unit::kElements * Unit::kDepthStep, kStrip = kStripRows<Unit>;

    const Call& call_;
    const FaAttentionParams& p_;
    const FaGradients& gradients_;
    const BackwardHead& head_;
    const Sequence& sequence_;
    const int64_t chunk_;
    const ChunkWork<Unit> work_;
    const BackwardLayout<Unit>& layout_ = work_.layout;
    float *const keys_, *const grad_k_, *const grad_v_;  // keys in rows of units; gradients with elements first
    ScoreGradients<Unit> scores_;
    Seen strips_[kBackwardRows<Unit> / kStrip];  // what each strip of a tile sees
};

}  // namespace FA_NAMESPACE
