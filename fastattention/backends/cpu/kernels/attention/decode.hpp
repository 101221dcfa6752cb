// Decode: a few query rows against keys and values in place, split over the keys and merged by log-sum-exp.
//
// Rows that share a key head are processed kGroup at a time, so that a key is read once for all of them. Scores are kept
// key by key, the group's rows side by side: lane t * kGroup + g of a vector is key t, row g. Vertical operations then
// serve all rows at once, and one reduction turns kWidth accumulators into one vector of scores.
//
// Token-major caches have the heads of a token side by side, in rows as short as 128 bytes. Read head by head, they reach
// half the memory bandwidth. So one task reads several heads, which take turns block by block, while prefetching runs
// through whole tokens of the next block (docs/decisions/0005-read-neighbouring-heads-together.md; how many heads: 0059).
#pragma once

namespace FA_NAMESPACE {

// Sums of products of keys and queries that are kept in registers, and keys whose rows are read at a time.
static constexpr int kScoreSums = Vec::kRegisters / 2, kMostKeysAtOnce = Vec::kWidth < 8 ? 8 : Vec::kWidth;

// scores[j * kGroup + g] = key j . query g for the keys of a block, rounded up to kScoreSums by repeating the last key.
template <int kGroup, class Element, class Dot>
static void score_block(Dot, const KeyBlock<Element>& block, int64_t head, const float* queries, int64_t query_stride,
                        int64_t headdim, float* scores) {
    constexpr int kKeys = smaller(kMostKeysAtOnce, kScoreSums / kGroup), kSums = kKeys * kGroup;
    const int64_t chunks = headdim / Dot::kChunk;
    const int tail = static_cast<int>(headdim % Dot::kChunk);
    const int64_t offset = head * block.keys.head_stride;
    PrefetchCursor<Element> ahead(block.keys, block, head);
    for (int64_t j = 0; j < block.n; j += kKeys) {
        Vec acc[kSums];
#pragma GCC unroll 16
        for (int i = 0; i < kSums; ++i) acc[i] = zero();
#pragma GCC unroll 16
        for (int t = 0; t < kKeys; ++t) ahead.prefetch_next(0, headdim);
        auto step = [&](const float* query, auto&& key_chunk) __attribute__((always_inline)) {
            // Keys or queries, whichever are fewer, stay in registers.
            if constexpr (kKeys > kGroup) {
                Vec row[kGroup];
#pragma GCC unroll 8
                for (int g = 0; g < kGroup; ++g) row[g] = load(query + g * query_stride);
#pragma GCC unroll 16
                for (int t = 0; t < kKeys; ++t) {
                    const Vec key = key_chunk(t);
#pragma GCC unroll 8
                    for (int g = 0; g < kGroup; ++g) acc[t * kGroup + g] = Dot::add_product(acc[t * kGroup + g], key, row[g]);
                }
            } else {
                Vec key[kKeys];
#pragma GCC unroll 16
                for (int t = 0; t < kKeys; ++t) key[t] = key_chunk(t);
#pragma GCC unroll 8
                for (int g = 0; g < kGroup; ++g) {
                    const Vec row = load(query + g * query_stride);
#pragma GCC unroll 16
                    for (int t = 0; t < kKeys; ++t) acc[t * kGroup + g] = Dot::add_product(acc[t * kGroup + g], key[t], row);
                }
            }
        };
        for (int64_t c = 0; c < chunks; ++c)
            step(queries + c * Vec::kWidth,
                 [&](int t) { return Dot::load_chunk(block.keys[j + t] + offset + c * Dot::kChunk); });
        if (tail)
            step(queries + chunks * Vec::kWidth,
                 [&](int t) { return Dot::load_chunk_partial(block.keys[j + t] + offset + chunks * Dot::kChunk, tail); });
#pragma GCC unroll 4
        for (int i = 0; i < kSums; i += Vec::kWidth) store(scores + j * kGroup + i, Dot::reduce(acc + i));
    }
}

// acc_o[g] += sum over keys of probability * value, for kChunks chunks of columns, starting at `column`. units: the unit of
// each row's probabilities.
template <class Element, class Dot, int kGroup, int kChunks, bool kPartial>
FA_INLINE void accumulate_columns(const KeyBlock<Element>& block, int64_t head, const float* probabilities,
                                  const float* units, float* acc_o, int64_t acc_stride, int64_t column, int64_t headdim_v) {
    constexpr int kVectors = Dot::kColumnVectors;
    const int tail = static_cast<int>(headdim_v - column);
    Vec acc[kGroup][kChunks][kVectors];
#pragma GCC unroll 8
    for (int g = 0; g < kGroup; ++g)
#pragma GCC unroll 16
        for (int c = 0; c < kChunks * kVectors; ++c)
            acc[g][c / kVectors][c % kVectors] = Dot::begin_sum(acc_o + g * acc_stride + column + c * Vec::kWidth);
    const int64_t offset = head * block.values.head_stride + column;
    PrefetchCursor<Element> ahead(block.values, block, head);
    auto value = [&](int64_t j, int c) __attribute__((always_inline)) {
        const Element* p = block.values[j] + offset + c * Dot::kChunk;
        return kPartial ? Dot::load_chunk_partial(p, tail) : Dot::load_chunk(p);
    };
    for (int64_t j = 0; j < block.n; j += Dot::kKeysPerStep) {
        // Each pass over the keys prefetches its own columns of later rows, so that memory is busy in all passes.
        for (int i = 0; i < Dot::kKeysPerStep; ++i) ahead.prefetch_next(column, kPartial ? tail : kChunks * Dot::kChunk);
        const float* p = probabilities + j / Dot::kKeysPerStep * kGroup;
#pragma GCC unroll 8
        for (int c = 0; c < kChunks; ++c) {
            Vec values[Dot::kKeysPerStep], columns[kVectors];
#pragma GCC unroll 2
            for (int i = 0; i < Dot::kKeysPerStep; ++i) values[i] = value(j + i, c);
            Dot::combine(values, columns);
#pragma GCC unroll 8
            for (int g = 0; g < kGroup; ++g)
#pragma GCC unroll 2
                for (int i = 0; i < kVectors; ++i)
                    acc[g][c][i] = Dot::multiply_add(acc[g][c][i], columns[i], broadcast(p[g]), i);
        }
    }
#pragma GCC unroll 8
    for (int g = 0; g < kGroup; ++g)
#pragma GCC unroll 16
        for (int c = 0; c < kChunks * kVectors; ++c) {
            float* to = acc_o + g * acc_stride + column + c * Vec::kWidth;
            store(to, Dot::end_sum(acc[g][c / kVectors][c % kVectors], to, units[g]));
        }
}

// Accumulates the columns from `column` on: kChunks chunks at a time as long as that many are left, then half as many.
template <class Element, class Dot, int kGroup, int kChunks>
FA_INLINE void accumulate_from(const KeyBlock<Element>& block, int64_t head, const float* probabilities, const float* units,
                               float* acc_o, int64_t acc_stride, int64_t column, int64_t headdim_v) {
    for (; column + kChunks * Dot::kChunk <= headdim_v; column += kChunks * Dot::kChunk)
        accumulate_columns<Element, Dot, kGroup, kChunks, false>(block, head, probabilities, units, acc_o, acc_stride, column,
                                                                 headdim_v);
    if constexpr (kChunks > 1) {
        accumulate_from<Element, Dot, kGroup, kChunks / 2>(block, head, probabilities, units, acc_o, acc_stride, column,
                                                           headdim_v);
    } else if (column < headdim_v) {
        accumulate_columns<Element, Dot, kGroup, 1, true>(block, head, probabilities, units, acc_o, acc_stride, column,
                                                          headdim_v);
    }
}

template <int kGroup, class Element, class Dot>
static void accumulate_block(Dot, const KeyBlock<Element>& block, int64_t head, const float* probabilities,
                             const float* units, float* acc_o, int64_t acc_stride, int64_t headdim_v) {
    // This many accumulators leave registers for a value and a broadcast.
    constexpr int kAccumulators = Vec::kRegisters == 32 ? 16 : 8;
    constexpr int kWanted = kAccumulators / (kGroup * Dot::kColumnVectors);
    constexpr int kChunks = kWanted < 1 ? 1 : (kWanted > 8 ? 8 : kWanted);
    accumulate_from<Element, Dot, kGroup, kChunks>(block, head, probabilities, units, acc_o, acc_stride, 0, headdim_v);
}

// Columns of a row of results.
template <class Dot>
FA_INLINE int64_t result_columns(const FaAttentionParams& p) {
    return round_up(p.headdim_v, Dot::kColumnStep);
}

// Floats from one row of DecodeSplit::acc_o to the next. Many rows of a latent decode, whole powers of two apart, would evict
// each other from the L1 cache.
template <class Dot>
FA_INLINE int64_t split_stride(const FaAttentionParams& p) {
    const int64_t columns = result_columns<Dot>(p);
    return values_in_keys(p) && columns > kUnpaddedColumns ? columns + kRowPadding : columns;
}

// Rows first_row ... first_row + kGroup - 1 of one split. Rows past the last repeat it, and their results are not kept.
template <class Element, class Dot, int kGroup>
class DecodeGroup {
public:
    // Floats of queries and results that a group needs: at most kMaxSplitFloats a row for all heads of a task.
    static int64_t memory_floats(const FaAttentionParams& p) { return kGroup * (query_stride(p) + result_columns<Dot>(p)); }

    // memory: memory_floats floats, aligned to 64 bytes.
    void start(const Call& call, const DecodeSplit& split, int64_t first_row, float* memory) {
        call_ = &call;
        split_ = &split;
        sequence_ = &call.sequences[split.sequence];
        score_units_ = ScoreUnits::of(*call.params);
        query_stride_ = query_stride(*call.params);
        acc_stride_ = result_columns<Dot>(*call.params);
        split_stride_ = split_stride<Dot>(*call.params);
        queries_ = memory;
        acc_o_ = memory + kGroup * query_stride_;
        const int64_t last_row = call.rows(*sequence_) - 1;
        for (int g = 0; g < kGroup; ++g) {
            rows_[g] = query_row(call, split.kv_head, smaller(first_row + g, last_row));
            row_max_[g] = -kInfinity;
            load_row(g);
        }
        store(lane_max_, broadcast(-kInfinity));
        store(references_, zero());
        store(lane_sums_, zero());
        memset(acc_o_, 0, kGroup * acc_stride_ * sizeof(float));
    }

    // `head`: which of the block's heads this is.
    void attend(const KeyBlock<Element>& block, int64_t head) {
        const TileRange& mask = sequence_->mask;
        const TileKind kind = mask.classify(rows_[0].token, rows_[kGroup - 1].token, block.first, block.first + block.n - 1);
        if (kind == TileKind::kSkipped) return;
        const int64_t padded = round_up(block.n * kGroup, larger(Vec::kWidth, Dot::kKeysPerStep * kGroup));
        score_block<kGroup>(Dot{}, block, head, queries_, query_stride_, call_->params->headdim, scores_);
        if constexpr (kQuantized<Element>) scale_scores(block, head, padded);
        if (score_units_.modified) score_mod(block);
        for (int64_t i = block.n * kGroup; i < padded; ++i) scores_[i] = -kInfinity;
        if (kind == TileKind::kPartial) apply_mask(block);
        softmax(padded);
        accumulate_block<kGroup>(Dot{}, block, head, probabilities_, units_, acc_o_, acc_stride_, call_->params->headdim_v);
    }

    // Whether `attend_run` can replace `attend` for keys that all rows see.
    bool takes_runs() const {
        return !score_units_.modified && call_->params->headdim % Dot::kChunk == 0 &&
               call_->params->headdim_v % Dot::kChunk == 0;
    }

    // Attends to whole blocks of keys that all rows see.
    void attend_run(const Run& run) {
        constexpr int64_t kSize = sizeof(Element);
        const int64_t headdim = call_->params->headdim, headdim_v = call_->params->headdim_v;
        for (int64_t j = 0; j < run.n; j += Dot::kBlock) {
            const int64_t next = j + Dot::kBlock, far = j + Dot::kFar;
            Dot::template score_run<kGroup>(run.key(j), run.key_stride, queries_, headdim, scores_,
                                            {run.value(j), run.value(far), run.value_stride, headdim_v * kSize});
            softmax(Dot::kBlock * kGroup);
            Dot::template accumulate_run<kGroup>(run.value(j), run.value_stride, probabilities_, acc_o_, acc_stride_,
                                                 headdim_v, {run.key(next), run.key(far), run.key_stride, headdim * kSize});
        }
    }

    // Hands the results of the first n rows to the split.
    void finish(int64_t first_row, int64_t n) {
        for (int64_t g = 0; g < n; ++g) {
            split_->row_max[first_row + g] = row_max_[g];
            float row_sum = 0.0f;
            for (int i = static_cast<int>(g); i < Vec::kWidth; i += kGroup) row_sum += lane_sums_[i];
            split_->row_sum[first_row + g] = row_sum;
            float* to = split_->acc_o + (first_row + g) * split_stride_;
            const float* from = acc_o_ + g * acc_stride_;
            for (int64_t c = 0; c < acc_stride_; c += Dot::kChunk) Dot::restore_order(from + c, to + c);
        }
    }

private:
    static int64_t query_stride(const FaAttentionParams& p) { return round_up(p.headdim, Dot::kChunk) / Dot::kKeysPerStep; }

    void load_row(int g) {
        float wide[kMaxHeaddim + 2 * Vec::kWidth];
        const int64_t padded = query_stride_ * Dot::kKeysPerStep;
        load_query(*call_, *sequence_, rows_[g], wide, padded);
        const float unit = Dot::template store_query<kGroup>(wide, padded, queries_, g, query_stride_);
        for (int i = g; i < Vec::kWidth; i += kGroup) query_units_[i] = unit;
    }

    // Scales the scores of a quantized cache, which are products with stored values. Scales of values multiply probabilities.
    void scale_scores(const KeyBlock<Element>& block, int64_t head, int64_t padded) {
        block.load_scales(head, key_scales_, value_scales_);
        const Vec units = load(query_units_);
        for (int64_t i = 0; i < padded; i += Vec::kWidth)
            store(scores_ + i, load(scores_ + i) * units * repeat_each<kGroup>(key_scales_ + i / kGroup));
    }

    // Modifies scores row by row, as each row has its own modifiers.
    void score_mod(const KeyBlock<Element>& block) {
        float row[Dot::kBlock + Vec::kWidth];
        for (int g = 0; g < kGroup; ++g) {
            for (int64_t j = 0; j < block.n; ++j) row[j] = scores_[j * kGroup + g];
            modify_scores(score_row(*call_, *sequence_, rows_[g].token, rows_[g].head), row, block.first, block.n);
            for (int64_t j = 0; j < block.n; ++j) scores_[j * kGroup + g] = row[j];
        }
    }

    void apply_mask(const KeyBlock<Element>& block) {
        for (int g = 0; g < kGroup; ++g) {
            const int64_t begin = sequence_->mask.row_begin(rows_[g].token) - block.first;
            const int64_t end = sequence_->mask.row_end(rows_[g].token) - block.first;
            for (int64_t j = 0; j < smaller(begin, block.n); ++j) scores_[j * kGroup + g] = -kInfinity;
            for (int64_t j = larger(end, 0); j < block.n; ++j) scores_[j * kGroup + g] = -kInfinity;
        }
    }

    void softmax(int64_t padded) {
        Vec highest = load(scores_);
        for (int64_t i = Vec::kWidth; i < padded; i += Vec::kWidth) highest = maximum(highest, load(scores_ + i));
        // This is rare after the first blocks. By branch prediction, exponentials do not wait for the maximum.
        if (reduce_max(select_less(load(lane_max_), highest, broadcast(1.0f), zero())) > 0.0f) online_max(highest);
        const Vec sum = exponentiate(padded);
        store(lane_sums_, load(lane_sums_) + sum);
    }

    // highest: the highest score of each lane, where lane i belongs to row i % kGroup.
    void online_max(Vec highest) {
        float lanes[Vec::kWidth];
        store(lanes, highest);
        for (int g = 0; g < kGroup; ++g) {
            float new_max = row_max_[g];
            for (int i = g; i < Vec::kWidth; i += kGroup) new_max = lanes[i] > new_max ? lanes[i] : new_max;
            if (new_max == row_max_[g]) continue;
            if (row_max_[g] != -kInfinity) rescale(g, score_units_.rescaling(row_max_[g], new_max));
            row_max_[g] = new_max;
            for (int i = g; i < Vec::kWidth; i += kGroup) lane_max_[i] = new_max;
        }
        store(references_, ScoreUnits::reference(load(lane_max_)));
    }

    Vec exponentiate(int64_t padded) {
        const Vec reference = load(references_);
        Vec sum = zero();
        for (int64_t i = 0; i < padded; i += Vec::kWidth) {
            Vec p = score_units_.template weight<Dot::kPrecise>(load(scores_ + i), reference);
            sum = sum + p;
            if constexpr (kQuantized<Element>) p = p * repeat_each<kGroup>(value_scales_ + i / kGroup);
            Dot::template store_probabilities<kGroup>(probabilities_, i, p);
        }
        Dot::template finish_probabilities<kGroup>(probabilities_, padded, units_);
        return sum;
    }

    void rescale(int g, float factor) {
        for (int i = g; i < Vec::kWidth; i += kGroup) lane_sums_[i] *= factor;
        float* acc_o = acc_o_ + g * acc_stride_;
        for (int64_t c = 0; c < acc_stride_; c += Vec::kWidth) store(acc_o + c, load(acc_o + c) * broadcast(factor));
    }

    const Call* call_;
    const DecodeSplit* split_;
    const Sequence* sequence_;
    ScoreUnits score_units_;
    int64_t query_stride_, acc_stride_, split_stride_;
    QueryRow rows_[kGroup];
    float row_max_[kGroup];
    // Per lane, where lane i belongs to row i % kGroup: the maxima, what weights are relative to, and sums of weights.
    float lane_max_[Vec::kWidth], references_[Vec::kWidth], lane_sums_[Vec::kWidth];
    float query_units_[Vec::kWidth], units_[kGroup];  // units of products with queries and with probabilities
    float *queries_, *acc_o_;  // (kGroup, query_stride_), in the Dot's layout, and (kGroup, acc_stride_)
    // One step may read the probability of the key after the last: it is 0.
    alignas(64) float scores_[Dot::kBlock * kGroup + kScoreSums];
    alignas(64) float probabilities_[Dot::kBlock * kGroup + Vec::kWidth];
    // Scales of the block's keys; anything finite after the last key.
    float key_scales_[kQuantized<Element> ? kBlockKeys + Vec::kWidth : 1] = {};
    float value_scales_[kQuantized<Element> ? kBlockKeys + Vec::kWidth : 1] = {};
};

template <class Element, class Dot, int kGroup>
static void decode_rows(const Call& call, const DecodeSplit* splits, int64_t num_heads, int64_t first_row, int64_t n) {
    const DecodeSplit& split = splits[0];
    const Sequence& s = call.sequences[split.sequence];
    const Rows k = call.keys(s, split.kv_head), v = call.values(s, split.kv_head);
    using Group = DecodeGroup<Element, Dot, kGroup>;
    Group groups[kMaxSplitHeads];
    alignas(64) float memory[kGroup * kMaxSplitFloats];
    Dot::template begin<kGroup>();
    for (int64_t head = 0; head < num_heads; ++head)
        groups[head].start(call, splits[head], first_row, memory + head * Group::memory_floats(*call.params));
    const int64_t first_token = query_row(call, split.kv_head, first_row).token;
    const int64_t last_token = query_row(call, split.kv_head, first_row + n - 1).token;
    const int64_t begin = larger(split.key_begin, s.mask.row_begin(first_token));
    const int64_t end = smaller(split.key_end, s.mask.row_end(last_token));
    KeyBlock<Element> block;
    block.heads = num_heads;
    const int64_t longest = larger(call.params->headdim, call.params->headdim_v) * static_cast<int64_t>(sizeof(Element));
    const int64_t divisor = longest > kLongRow && Dot::kBlock == kBlockKeys ? 2 : 1;
    block.size = num_heads > 1 ? Dot::kTurn : Dot::kBlock / divisor;
    block.ahead = num_heads > 1 ? Dot::kTurn : Dot::kAhead / divisor;
    block.keys.head_stride = call.params->k_stride_head;
    block.values.head_stride = call.params->v_stride_head;
    block.keys.headdim = call.params->headdim;
    block.values.headdim = call.params->headdim_v;
    if constexpr (kQuantized<Element>)
        block.scales = {call.key_scales(s, split.kv_head), call.value_scales(s, split.kv_head),
                        call.params->k_scale_stride_head, call.params->v_scale_stride_head};
    // Keys that all rows see.
    const int64_t full_begin = s.mask.row_begin(last_token), full_end = smaller(end, s.mask.row_end(first_token));
    for (int64_t key = begin; key < end;) {
        if constexpr (Dot::kRuns) {
            if (num_heads == 1 && groups[0].takes_runs() && key >= full_begin && key + Dot::kBlock <= full_end) {
                const Run run = Run::locate(k, v, key, full_end, Dot::kBlock);
                groups[0].attend_run(run);
                key += run.n;
                if (run.n > 0) continue;
            }
        }
        block.locate(k, v, key, end);
        for (int64_t head = 0; head < num_heads; ++head) groups[head].attend(block, head);
        key += block.size;
    }
    for (int64_t head = 0; head < num_heads; ++head) groups[head].finish(first_row, n);
    Dot::end();
}

// splits: the same keys of num_heads neighbouring heads.
template <class Element, class Dot>
static void decode_splits(const Call& call, const DecodeSplit* splits, int64_t num_heads) {
    const int64_t rows = call.rows(call.sequences[splits[0].sequence]);
    for (int64_t row = 0; row < rows; row += kMaxGroup) {
        const int64_t n = smaller(kMaxGroup, rows - row);
        if (n == 1) {
            decode_rows<Element, Dot, 1>(call, splits, num_heads, row, n);
        } else if (n == 2) {
            decode_rows<Element, Dot, 2>(call, splits, num_heads, row, n);
        } else if (n <= 4) {
            decode_rows<Element, Dot, 4>(call, splits, num_heads, row, n);
        } else {
            decode_rows<Element, typename Dot::Grouped, kMaxGroup>(call, splits, num_heads, row, n);
        }
    }
}

}  // namespace FA_NAMESPACE
