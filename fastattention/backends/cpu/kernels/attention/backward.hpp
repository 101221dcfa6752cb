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

// Rows of a tile are a multiple of every Unit::kRowStep and of twice kAmxTile. Keys of a chunk are a multiple of
// kDropoutKeys and so of kPanel. A chunk's keys, values and their gradients take 20 bytes per key and element, and share the
// L2 cache with a tile.
static constexpr int64_t kChunkElements = Vec::kWidth == 16 ? 32768 : 16384;  // keys times elements
static constexpr int64_t kMostChunkKeys = 256;
static constexpr int64_t kBackwardRows = 96;

// The layout of a task's memory. A matrix `x` has x_stride floats from row to row.
template <class Unit>
struct BackwardLayout {
    int64_t rows, keys;
    int64_t query_units, value_units;      // units per row, padded to the depth of a product
    int64_t query_stride, value_stride;    // for tiles (rows, elements)
    int64_t query_rows, value_rows;        // rows of matrices with elements first
    int64_t row_stride;                    // for tiles with elements first (elements, units of rows)
    int64_t query_columns, value_columns;  // whole vectors of elements
    int64_t key_stride;                    // for the chunk's keys (units of keys, elements), and a tile's gradient of q
    int64_t score_stride;                  // for scores (rows, keys), and the chunk's gradients (elements, keys)

    explicit BackwardLayout(const FaAttentionParams& p) {
        constexpr int64_t kDepth = Unit::kElements * Unit::kDepthStep;
        const int64_t widest = larger(p.headdim, p.headdim_v);
        rows = kBackwardRows;
        keys = larger(kDropoutKeys, smaller(kMostChunkKeys, kChunkElements / widest / kDropoutKeys * kDropoutKeys));
        query_units = round_up(p.headdim, kDepth) / Unit::kElements;
        value_units = round_up(p.headdim_v, kDepth) / Unit::kElements;
        query_columns = round_up(p.headdim, larger(Vec::kWidth, kDepth));
        value_columns = round_up(p.headdim_v, larger(Vec::kWidth, kDepth));
        query_stride = query_columns + kRowPadding;
        value_stride = value_columns + kRowPadding;
        query_rows = larger(query_columns, round_up(p.headdim, Unit::kRowStep));
        value_rows = larger(value_columns, round_up(p.headdim_v, Unit::kRowStep));
        row_stride = rows / Unit::kElements + kRowPadding;
        key_stride = query_stride;
        score_stride = keys + kRowPadding;
    }

    int64_t queries() const { return 0; }
    int64_t grads() const { return queries() + rows * query_stride; }
    int64_t queries_t() const { return grads() + rows * value_stride; }
    int64_t grads_t() const { return queries_t() + query_rows * row_stride; }
    int64_t stats() const { return grads_t() + value_rows * row_stride; }
    int64_t tile_floats() const { return stats() + kRowStats * rows; }

    // Per row: lse, +infinity if it sees no keys; delta; the factor of weights.
    static constexpr int64_t kRowStats = 3;
};

// With a block mask, rows of a tile are within a row of blocks.
static_assert(kBlockTileRows <= kBackwardRows);
FA_INLINE int64_t rows_of_tile(const FaAttentionParams& p) { return p.block_mask ? kBlockTileRows : kBackwardRows; }

template <class Unit>
FA_INLINE BackwardGeometry backward_geometry(const FaAttentionParams& p) {
    const BackwardLayout<Unit> l(p);
    BackwardGeometry g;
    g.tile_rows = rows_of_tile(p);
    g.keys = l.keys;
    g.tile_floats = l.tile_floats();
    g.grad_q_floats = l.rows * l.key_stride;
    const int64_t transposed = l.keys * (l.query_units + l.value_units);
    const int64_t gradients = (l.query_rows + l.value_rows) * l.score_stride;
    const int64_t scores = (2 + (Unit::kElements - 1)) * l.rows * l.score_stride;
    g.scratch_floats = transposed + l.keys * l.key_stride + gradients + scores;
    return g;
}

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
          rows_(call.tile(sequence_, tile, rows_of_tile(p_))),
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
            float pairs[kBackwardRows / 2 * (kMaxHeaddim + kRowPadding)];
            pair_rows(at_ + from, from_stride, pairs, columns, layout_.rows, columns);
            transpose_units(pairs, columns, result, stride, units, columns);
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

template <class Element, class Unit>
class BackwardChunk {
public:
    BackwardChunk(const Call& call, const FaGradients& gradients, const BackwardHead& head, int64_t chunk, float* scratch)
        : call_(call),
          p_(*call.params),
          gradients_(gradients),
          head_(head),
          sequence_(call.sequences[head.sequence]),
          layout_(p_),
          units_(ScoreUnits::of(p_)),
          dropout_(Dropout::of(p_)),
          chunk_(chunk),
          first_key_(chunk * layout_.keys),
          num_keys_(smaller(layout_.keys, sequence_.mask.seqlen_k - first_key_)) {
        keys_t_ = scratch;
        values_t_ = keys_t_ + layout_.keys * layout_.query_units;
        keys_ = values_t_ + layout_.keys * layout_.value_units;
        grad_k_ = keys_ + layout_.keys * layout_.key_stride;
        grad_v_ = grad_k_ + layout_.query_rows * layout_.score_stride;
        weights_ = grad_v_ + layout_.value_rows * layout_.score_stride;
        grad_s_ = weights_ + layout_.rows * layout_.score_stride;
        grad_s_rows_ = Unit::kElements == 2 ? grad_s_ + layout_.rows * layout_.score_stride : grad_s_;
    }

    void run() {
        Unit::begin();
        pack();
        memset(grad_k_, 0, layout_.query_rows * layout_.score_stride * sizeof(float));
        memset(grad_v_, 0, layout_.value_rows * layout_.score_stride * sizeof(float));
        const int64_t size = rows_of_tile(p_), tiles = call_.num_tiles(sequence_, size);
        for (int64_t tile = 0; tile < tiles; ++tile) visit(tile, call_.tile(sequence_, tile, size));
        Unit::end();
        if (gradients_.grad_k)
            write(grad_k_, p_.headdim, layout_.query_columns, static_cast<float>(p_.softmax_scale), gradients_.grad_k);
        if (gradients_.grad_v) write(grad_v_, p_.headdim_v, layout_.value_columns, 1.0f, gradients_.grad_v);
    }

private:
    using Self = BackwardChunk;
    using Seen = RowsRange<long long>;

    QueryRow row_at(const RowTile& rows, int64_t row) const { return query_row(call_, head_.kv_head, rows, row); }

    // Packs keys and values with elements first, in panels, and keys also in rows. Zeros follow the last key.
    void pack() {
        pack(call_.keys(sequence_, head_.kv_head), p_.headdim, layout_.query_columns, layout_.query_units, keys_t_, keys_);
        pack(call_.values(sequence_, head_.kv_head), p_.headdim_v, layout_.value_columns, layout_.value_units, values_t_,
             nullptr);
    }

    void pack(const Rows& rows, int64_t n, int64_t columns, int64_t units, float* panels, float* as_they_are) const {
        char* addresses[kMostChunkKeys];
        rows.addresses(first_key_, num_keys_, addresses);
        float block[Vec::kWidth * kBlockStride];
        for (int64_t first = 0; first < layout_.keys; first += Vec::kWidth) {
            for (int64_t j = first; j < first + Vec::kWidth; ++j)
                load_units(j < num_keys_ ? addresses[j] : nullptr, n, columns, block + (j - first) * kBlockStride);
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
        const QueryRow first = row_at(tile_rows, 0);
        const Seen seen = sequence_.mask.rows(first.token, row_at(tile_rows, tile_rows.count - 1).token);
        const BlockRow blocks = call_.block_row(sequence_, first.token, first.head);
        const int64_t begin = larger(seen.seen_begin, first_key_), end = smaller(seen.seen_end, first_key_ + num_keys_);
        if (blocks.next(begin, end) >= end) return;
        const int64_t rows = round_up(tile_rows.count, common_multiple(Unit::kRowStep, Unit::kDepthStep * Unit::kElements));
        const auto for_each_run = [&](auto use) {
            KeyRuns runs(blocks, begin, end);
            while (runs.next(layout_.keys))
                use((runs.first() - first_key_) / kPanel * kPanel, round_up(runs.past_last() - first_key_, kPanel));
        };
        for_each_run([&](int64_t from, int64_t to) { add_run(tile, tile_rows, rows, from, to, seen); });
        if (gradients_.grad_q) add_to_queries(tile, tile_rows, rows, blocks, seen, for_each_run);
    }

    void add_run(int64_t tile, const RowTile& tile_rows, int64_t rows, int64_t begin, int64_t end, const Seen& seen) {
        const float* at = head_.tiles + tile * layout_.tile_floats();
        multiply_by_panels(at + layout_.queries(), layout_.query_stride, keys_t_, layout_.query_units, weights_, begin, end,
                           rows);
        multiply_by_panels(at + layout_.grads(), layout_.value_stride, values_t_, layout_.value_units, grad_s_, begin, end,
                           rows);
        const bool full = !sequence_.tiles && seen.classify(first_key_ + begin, first_key_ + end - 1) == TileKind::kFull;
        differentiate(at + layout_.stats(), tile_rows, rows, begin, end, full);
        if (gradients_.grad_v) accumulate(at + layout_.grads_t(), p_.headdim_v, weights_, grad_v_, begin, end, rows);
        if (gradients_.grad_k) accumulate(at + layout_.queries_t(), p_.headdim, grad_s_, grad_k_, begin, end, rows);
    }

    // result (rows, keys begin to end) = a (rows, elements) times panels.
    void multiply_by_panels(const float* a, int64_t stride, const float* panels, int64_t units, float* result, int64_t begin,
                            int64_t end, int64_t rows) const {
        for (int64_t j = begin; j < end; j += kPanel)
            multiply_key_panel<Unit>(a, stride, panels + j * units, units, result + j, layout_.score_stride, rows, kPanel);
    }

    // result (elements, keys begin to end) += a (elements, units of rows) times b (units of rows, keys).
    void accumulate(const float* a, int64_t elements, const float* b, float* result, int64_t begin, int64_t end,
                    int64_t rows) const {
        const int64_t count = round_up(elements, Unit::kRowStep);
        for (int64_t j = begin; j < end; j += kPanel)
            multiply_panel<true>(Unit{}, a, layout_.row_stride, b + j, layout_.score_stride, rows / Unit::kElements,
                                 result + j, layout_.score_stride, count, kPanel);
    }

    // The terms that turn a row's products into weights and gradients of scores.
    struct Row {
        ScoreRow score;
        Vec lse, delta, factor;
        Vec scale, shift;  // of products, if scores are not modified
        Vec begin, end;    // the keys of the chunk that the row sees
        float factors[kMostChunkKeys];  // for dropout
        float visible[kMostChunkKeys];  // 0 where tiles of a block mask hide a key, 1 elsewhere; only if there are such
    };

    template <bool kModified, bool kDrops>
    void set(Row& r, const float* stats, const RowTile& tile_rows, int64_t row, int64_t begin, int64_t end) const {
        // A padding row is like the last row, but its lse makes all weights 0.
        const QueryRow where = row_at(tile_rows, smaller(row, tile_rows.count - 1));
        if (kModified) r.score = score_row(call_, sequence_, where.token, where.head);
        if (kDrops) {
            const int64_t first = begin / kDropoutKeys * kDropoutKeys, n = round_up(end - first, kDropoutKeys);
            dropout_factors(dropout_, sequence_.batch, where, first_key_ + first, n, r.factors + first);
        }
        if (sequence_.tiles) {
            for (int64_t j = begin; j < end; ++j) r.visible[j] = 1.0f;
            const BlockRow blocks = call_.block_row(sequence_, where.token, where.head);
            blocks.for_each_hidden(first_key_ + begin, smaller(first_key_ + end, sequence_.mask.seqlen_k),
                                   [&](int64_t key) { r.visible[key - first_key_] = 0.0f; });
        }
        r.lse = broadcast(stats[row]);
        r.delta = broadcast(stats[row + layout_.rows]);
        r.factor = broadcast(stats[row + 2 * layout_.rows]);
        r.scale = broadcast(units_.log2);
        r.shift = broadcast(-stats[row] * kLog2E);
        r.begin = broadcast(static_cast<float>(sequence_.mask.row_begin(where.token) - first_key_));
        r.end = broadcast(static_cast<float>(sequence_.mask.row_end(where.token) - first_key_));
    }

    // 2^x, at most 1: x is above 0 only by rounding, which is much where lse is large.
    template <bool kPrecise>
    static Vec weight(Vec x) {
        return exp2<kPrecise>(minimum(zero(), x));
    }

    // Turns the products p and dp with keys from j on into weights and gradients of the scaled products.
    // Dropout multiplies weights before their product with values, and therefore the gradients of weights too.
    template <bool kModified, bool kMasked, bool kDrops>
    __attribute__((always_inline)) void differentiate_vector(const Row& row, int64_t j, Vec& p, Vec& dp) const {
        constexpr bool kPrecise = Unit::kElements == 1;
        Vec slope = broadcast(1.0f);
        if (kModified) {
            const Vec score = modified_scores(row.score, p, first_key_ + j, larger(num_keys_ - j, 0), &slope);
            p = weight<kPrecise>((score - row.lse) * broadcast(kLog2E)) * row.factor;
        } else {
            p = weight<kPrecise>(fma(p, row.scale, row.shift));
        }
        if (kDrops) dp = dp * load(row.factors + j);
        dp = p * (dp - row.delta);
        if (kDrops) p = p * load(row.factors + j);
        if (kModified) dp = dp * slope;
        if (kMasked) {
            const Vec index = broadcast(static_cast<float>(j)) + iota();
            p = select_less(index, row.end, select_less(index, row.begin, zero(), p), zero());
            dp = select_less(index, row.end, select_less(index, row.begin, zero(), dp), zero());
            if (sequence_.tiles) {
                const Vec visible = load(row.visible + j);
                p = select_less(zero(), visible, p, zero());
                dp = select_less(zero(), visible, dp, zero());
            }
        }
    }

    void differentiate(const float* stats, const RowTile& tile_rows, int64_t rows, int64_t begin, int64_t end, bool full) {
        const bool drops = p_.dropout_p > 0.0;
        auto run = [&](auto kernel) { (this->*kernel)(stats, tile_rows, rows, begin, end); };
        if (units_.modified)
            return run(drops ? &Self::differentiate<true, true, true> : &Self::differentiate<true, true, false>);
        if (drops) return run(&Self::differentiate<false, true, true>);
        run(full ? &Self::differentiate<false, false, false> : &Self::differentiate<false, true, false>);
    }

    // Overwrites the products in weights_ and grad_s_ with weights and gradients: floats in place, pairs of two neighbouring
    // rows in the first half of the rows, which have been read by then.
    template <bool kModified, bool kMasked, bool kDrops>
    void differentiate(const float* stats, const RowTile& tile_rows, int64_t rows, int64_t begin, int64_t end) {
        const int64_t stride = layout_.score_stride;
        Row first, second;
        for (int64_t i = 0; i < rows; i += Unit::kElements) {
            float *p = weights_ + i * stride, *dp = grad_s_ + i * stride;
            set<kModified, kDrops>(first, stats, tile_rows, i, begin, end);
            if constexpr (Unit::kElements == 1) {
                for (int64_t j = begin; j < end; j += Vec::kWidth) {
                    Vec weight = load(p + j), grad = load(dp + j);
                    differentiate_vector<kModified, kMasked, kDrops>(first, j, weight, grad);
                    store(p + j, weight);
                    store(dp + j, grad);
                }
            } else {
                set<kModified, kDrops>(second, stats, tile_rows, i + 1, begin, end);
                float *p_pairs = weights_ + i / 2 * stride, *dp_pairs = grad_s_ + i / 2 * stride;
                auto* dp_row = reinterpret_cast<Bfloat16*>(grad_s_rows_ + i * stride);
                for (int64_t j = begin; j < end; j += Vec::kWidth) {
                    Vec weight = load(p + j), grad = load(dp + j);
                    Vec weight_below = load(p + stride + j), grad_below = load(dp + stride + j);
                    differentiate_vector<kModified, kMasked, kDrops>(first, j, weight, grad);
                    differentiate_vector<kModified, kMasked, kDrops>(second, j, weight_below, grad_below);
                    store(p_pairs + j, Unit::pack(weight, weight_below));
                    store(dp_pairs + j, Unit::pack(grad, grad_below));
                    store(dp_row + j, grad);
                    store(dp_row + 2 * stride + j, grad_below);
                }
            }
        }
    }

    // Waits until earlier chunks have added to the tile, adds to it, and writes it if no chunk follows.
    template <class ForEachRun>
    void add_to_queries(int64_t tile, const RowTile& tile_rows, int64_t rows, const BlockRow& blocks, const Seen& seen,
                        ForEachRun for_each_run) {
        float* grad_q = head_.grad_q + tile * layout_.rows * layout_.key_stride;
        bool adds = blocks.next(seen.seen_begin, first_key_) < first_key_;  // whether earlier chunks have added to the tile
        if (adds) wait_for(head_.turn + tile, static_cast<int32_t>(chunk_));
        for_each_run([&](int64_t begin, int64_t end) {
            if (adds) {
                multiply_keys<true>(grad_q, rows, begin, end);
            } else {
                multiply_keys<false>(grad_q, rows, begin, end);
            }
            adds = true;
        });
        const int64_t next_key = blocks.next(first_key_ + layout_.keys, seen.seen_end);
        if (next_key < seen.seen_end) {
            __atomic_store_n(head_.turn + tile, static_cast<int32_t>(next_key / layout_.keys), __ATOMIC_RELEASE);
            return;
        }
        for (int64_t row = 0; row < tile_rows.count; ++row) {
            const QueryRow where = row_at(tile_rows, row);
            const int64_t at = ((head_.first_query + where.token) * p_.nheads + where.head) * p_.headdim;
            store_scaled(grad_q + row * layout_.key_stride, broadcast(static_cast<float>(p_.softmax_scale)),
                         static_cast<Element*>(gradients_.grad_q) + at, p_.headdim);
        }
    }

    template <bool kAccumulate>
    void multiply_keys(float* grad_q, int64_t rows, int64_t begin, int64_t end) const {
        const int64_t columns = round_up(p_.headdim, Vec::kWidth), depth = (end - begin) / Unit::kElements;
        const int64_t unit = begin / Unit::kElements;
        for (int64_t c = 0; c < columns; c += kPanel)
            multiply_panel<kAccumulate>(Unit{}, grad_s_rows_ + unit, layout_.score_stride,
                                        keys_ + unit * layout_.key_stride + c, layout_.key_stride, depth, grad_q + c,
                                        layout_.key_stride, rows, smaller(kPanel, columns - c));
    }

    // Writes a gradient of the chunk's keys or values, transposed from elements first to rows.
    void write(const float* gradient, int64_t n, int64_t columns, float scale, void* to) const {
        float block[Vec::kWidth * kBlockStride];
        for (int64_t j = 0; j < num_keys_; j += Vec::kWidth) {
            transpose_units(gradient + j, layout_.score_stride, block, kBlockStride, columns, Vec::kWidth);
            for (int64_t k = 0; k < smaller(Vec::kWidth, num_keys_ - j); ++k) {
                const int64_t token = head_.first_key + first_key_ + j + k;
                store_scaled(block + k * kBlockStride, broadcast(scale),
                             static_cast<Element*>(to) + (token * p_.nheads_k + head_.kv_head) * n, n);
            }
        }
    }

    const Call& call_;
    const FaAttentionParams& p_;
    const FaGradients& gradients_;
    const BackwardHead& head_;
    const Sequence& sequence_;
    const BackwardLayout<Unit> layout_;
    const ScoreUnits units_;
    const Dropout dropout_;
    const int64_t chunk_, first_key_, num_keys_;
    float *keys_t_, *values_t_, *keys_, *grad_k_, *grad_v_;
    float *weights_, *grad_s_;  // products of queries with keys and of gradients with values; later weights and gradients
    float* grad_s_rows_;  // gradients of scores, row by row
};

}  // namespace FA_NAMESPACE
