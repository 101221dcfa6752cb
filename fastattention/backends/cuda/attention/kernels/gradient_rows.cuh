// The rows of a warp in a backward. They are keys, whose gradients are summed over all queries that see them, or queries,
// whose gradients are summed over the keys they see.
//
//     p  = exp(s - lse)          the weights, recomputed from the forward's lse
//     dv = p^T do                dp = do v^T
//     ds = p (dp - delta)        delta: delta.cuh
//     dq = ds k                  dk = ds^T q       both times softmax_scale
//
// (FlashAttention-2, arXiv 2307.08691, algorithm 2; the gradient of lse is part of delta because dlse/ds = p.) A row has two
// vectors: the first is a key or a query, the second a value or a gradient of the result. Weights and gradients of scores
// stay in registers, in the layout of operands of the second products, unless other warps need them.
#pragma once

#include FA_ARCH_HEADER

#include "bias_tiles.cuh"
#include "dropout.cuh"
#include "epilogue.cuh"
#include "hidden_pairs.cuh"
#include "mask.cuh"
#include "scores.cuh"
#include "tile_walk.cuh"

namespace fastattention {

constexpr bool kRowsAreKeys = Config::rows_are_keys;
constexpr bool kGradFirst = Config::differentiates_scores;  // differentiates the rows' first vectors
constexpr bool kGradSecond = Config::differentiates_values;  // differentiates their second vectors, if these are values
constexpr bool kSumsQueries = Config::sums_queries;  // rows are keys, and gradients of queries are summed in memory
static_assert(kRowsAreKeys || !kGradSecond, "gradients of the result have none");
static_assert(!kGroupedRows && !kPaged, "a backward has no cache");

static_assert(kValueParts == 1 || kGradFirst != kGradSecond, "columns of two gradients would be shared out differently");

constexpr int kFirstPitch = pitch_of<Arch::kSharedBytes>(kHeaddim);
constexpr int kSecondPitch = pitch_of<Arch::kSharedBytes>(kHeaddimV);

// Tiles of scores that warps leave for others: gradients, and weights after them.
constexpr bool kLeavesScores = kSumsQueries || kColumnWarps > 1;
constexpr bool kLeavesGrads = kLeavesScores && kGradFirst, kLeavesWeights = kColumnWarps > 1 && kGradSecond;
constexpr int kLeftTile = kTileM * kProbabilityPitch, kWeightsAt = kLeavesGrads ? kLeftTile : 0;
constexpr int kLeftBytes = kLeftTile * (kLeavesGrads + kLeavesWeights);

constexpr int kStatsPlanes = 1 + kGradFirst + kHasBias;

// The stats of a query row.
struct QueryStats {
    float lse, delta, share;  // delta.cuh
    ScoreRow row;
};

class GradientRows {
public:
    using Scores = float[kSteps][kWarpKeys / 8][Arch::kElements];
    using Biases = BiasTiles<Arch, kRowsAreKeys ? kWarpKeys : kWarpRows, kRowsAreKeys ? kWarpRows : kWarpKeys, kWarps>;

    // mask: the mask of these rows, which may be keys (mask_of_rows); last_row: the CTA's last row that exists.
    FA_DEVICE GradientRows(const BackwardParams& params, const Work& work, const BasicTileRange<int>& mask, int last_row)
        : params_(params),
          p_(params.call),
          work_(work),
          mask_(mask),
          last_row_(last_row),
          warp_row_(work.m_tile * kTileM + first_warp_row()) {
        clear(grad_first_);
        clear(grad_second_);
    }

    // Loads this warp's rows from those of the CTA in shared memory.
    FA_DEVICE void load(uint32_t first, uint32_t second, uint32_t stats) {
        first_.load(first + first_warp_row() * kFirstPitch);
        if constexpr (kGradFirst) second_.load(second + first_warp_row() * kSecondPitch);
        stats_shared_ = stats + first_warp_row() * 4;
    }

    FA_DEVICE TileKind kind_of(int column) const {
        if (warp_row_ > last_row_) return TileKind::kSkipped;
        if constexpr (kMixesBlocks) {
            if (!block_grid(p_, work_.batch, head_, kRowsAreKeys).keeps(warp_row_, column)) return TileKind::kSkipped;
        }
        // Computed anew for each tile, which saves four registers.
        const int first = opaque(warp_row_);
        return mask_.rows(first, smaller(first + kWarpRows - 1, last_row_)).classify(column, column + kTileN - 1);
    }

    // head: the query head, whether queries are rows or columns.
    FA_DEVICE void begin_head(int head) {
        head_ = head;
        slope_ = alibi_slope(p_, work_.batch, head);
    }

    // Computes the weights of a tile of what the rows see, and the gradients of its scores; both are zero before. Its vectors,
    // and stats if they are queries, are in shared memory.
    FA_DEVICE void score(Scores& weights, Scores& grads, uint32_t first, uint32_t second, uint32_t stats,
                         const StagedBiases& biases, int tile_column, TileKind kind) const {
        const int column = tile_column + first_warp_key();
        stats += first_warp_key() * 4;
        Scores slopes;
        if constexpr (kStartsFromAlibi) start_from_alibi(weights, column);
        Arch::multiply_rows(weights, first_, first);
        if (kStagesBias && biases.exist) {
            find_weights<kStagesBias>(weights, slopes, biases, stats, column);
        } else {
            find_weights<false>(weights, slopes, biases, stats, column);
        }
        if (kind != TileKind::kFull)
            apply_mask<Arch>(weights, mask_, column, 0.0f, [&](int step, int which) {
                return opaque(warp_row_) + step * Arch::kStepRows + Arch::row(which);
            });
        if constexpr (kBlockSparse) {
            if (p_.tile_index != nullptr)
                hide_pairs<Arch, kRowsAreKeys>(weights, p_, work_.batch, head_, opaque(warp_row_), column, 0.0f);
        }
        if constexpr (kGradFirst) Arch::multiply_rows(grads, second_, second);
        if constexpr (kDrops) {
            drop(weights, grads, slopes, stats, column);
        } else if constexpr (kGradFirst) {
            differentiate(grads, weights, slopes, stats, column);
        }
    }

    // Leaves the scores that other warps need. A template, as not all architectures have this.
    template <class Path = Arch>
    FA_DEVICE void leave(const Scores& weights, const Scores& grads, uint32_t to) const {
        const uint32_t own = to + first_warp_row() * kProbabilityPitch;
        if constexpr (kLeavesGrads) Path::leave_probabilities(own, grads);
        if constexpr (kLeavesWeights) Path::leave_probabilities(own + kWeightsAt, weights);
    }

    // Adds the products of a tile to the gradients. Calls begin_next when registers have become free.
    template <class BeginNext>
    FA_DEVICE void accumulate(const Scores& weights, const Scores& grads, uint32_t first, uint32_t second, uint32_t left,
                              BeginNext begin_next) {
        if constexpr (kGradFirst && kGradSecond) multiply<kHeaddimV>(grad_second_, weights, left + kWeightsAt, second);
        begin_next();
        if constexpr (kGradFirst) {
            multiply<kHeaddim>(grad_first_, grads, left, first);
        } else {
            multiply<kHeaddimV>(grad_second_, weights, left + kWeightsAt, second);
        }
    }

    FA_DEVICE int head() const { return head_; }

    // Writes the gradients by way of shared memory. All threads have passed a barrier since it was last read.
    FA_DEVICE void finish(uint32_t first, uint32_t second) const {
        if constexpr (kGradFirst)
            write<kHeaddim>(grad_first_, kRowsAreKeys ? params_.grad_k : params_.grad_q, p_.headdim, first, p_.softmax_scale);
        if constexpr (kGradSecond) write<kHeaddimV>(grad_second_, params_.grad_v, p_.headdim_v, second, 1.0f);
    }

private:
    template <int kTiles>
    static FA_DEVICE void clear(float (&acc)[kSteps][kTiles][Arch::kElements]) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
#pragma unroll
            for (int n = 0; n < kTiles; ++n)
#pragma unroll
                for (int i = 0; i < Arch::kElements; ++i) acc[step][n][i] = 0.0f;
    }

    // Rows are in the place of queries in the mask (mask_of_rows).
    FA_DEVICE int num_rows() const { return mask_.seqlen_q; }
    FA_DEVICE int num_columns() const { return mask_.seqlen_k; }

    FA_DEVICE int row_of(int step, int which) const { return warp_row_ + step * Arch::kStepRows + Arch::row(which); }

    // Calls visit(stats of a query, key, step, n, i) for each element of this lane.
    template <class Visit>
    FA_DEVICE void for_each_element(uint32_t stats, int column, Visit visit) const {
        if constexpr (kRowsAreKeys) {
#pragma unroll
            for (int n = 0; n < kWarpKeys / 8; ++n)
#pragma unroll
                for (int first = 0; first < Arch::kElements; ++first) {
                    if (Arch::row_of_element(first) != 0) continue;
                    const QueryStats query = stats_of_column(stats, column, Arch::score_column(n, first));
#pragma unroll
                    for (int step = 0; step < kSteps; ++step)
#pragma unroll
                        for (int i = 0; i < Arch::kElements; ++i)
                            if (Arch::column_of_element(i) == Arch::column_of_element(first))
                                visit(query, row_of(step, Arch::row_of_element(i)), step, n, i);
                }
        } else {
#pragma unroll
            for (int step = 0; step < kSteps; ++step)
#pragma unroll
                for (int which = 0; which < 2; ++which) {
                    const QueryStats query = stats_of_row(step, which);
#pragma unroll
                    for (int n = 0; n < kWarpKeys / 8; ++n)
#pragma unroll
                        for (int i = 0; i < Arch::kElements; ++i)
                            if (Arch::row_of_element(i) == which) visit(query, column + Arch::score_column(n, i), step, n, i);
                }
        }
    }

    FA_DEVICE QueryStats stats_of_column(uint32_t stats, int column, int at) const {
        QueryStats result = load_stats<kTileN>(stats + at * 4);
        if constexpr (kModifiesScores && !kStartsFromAlibi)
            result.row =
                score_row(p_, work_.batch, head_, slope_, smaller(column + at, num_columns() - 1), num_columns(), num_rows());
        return result;
    }

    FA_DEVICE QueryStats stats_of_row(int step, int which) const {
        QueryStats result = load_stats<kTileM>(stats_shared_ + (step * Arch::kStepRows + Arch::row(which)) * 4);
        if constexpr (kModifiesScores && !kStartsFromAlibi)
            result.row =
                score_row(p_, work_.batch, head_, slope_, smaller(row_of(step, which), last_row_), num_rows(), num_columns());
        return result;
    }

    // Loads the stats of a query from planes of kCount floats.
    template <int kCount>
    static FA_DEVICE QueryStats load_stats(uint32_t at) {
        const auto load = [&](int plane) { return as_float(load_shared_32(at + plane * kCount * 4)); };
        QueryStats result{load(0), 0.0f, 1.0f, {}};
        if constexpr (kGradFirst) result.delta = load(1);
        if constexpr (kHasBias) result.share = load(kStatsPlanes - 1);
        return result;
    }

    // Rows and columns of a lane differ from its first by constants, and so do distances.
    FA_DEVICE void start_from_alibi(Scores& scores, int column) const {
        constexpr int kSign = kRowsAreKeys ? 1 : -1;
        const int first = kSign * (row_of(0, 0) - column - Arch::score_column(0, 0) - (num_rows() - num_columns()));
        const float first_distance = static_cast<float>(first);
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
#pragma unroll
            for (int n = 0; n < kWarpKeys / 8; ++n)
#pragma unroll
                for (int i = 0; i < Arch::kElements; ++i) {
                    const int down = step * Arch::kStepRows + Arch::row(Arch::row_of_element(i)) - Arch::row(0);
                    const int right = Arch::score_column(n, i) - Arch::score_column(0, 0);
                    scores[step][n][i] = alibi_of(slope_, first_distance + static_cast<float>(kSign * (down - right)));
                }
    }

    // Turns products into weights. An exponent is above 0 only by rounding, which is much where lse is large. slopes: the
    // derivatives of capped scores by products times softmax_scale.
    template <bool kBiasesAreStaged>
    FA_DEVICE void find_weights(Scores& weights, Scores& slopes, const StagedBiases& biases, uint32_t stats,
                                int column) const {
        uint32_t pairs[kBiasesAreStaged ? kSteps : 1][kBiasesAreStaged ? kWarpKeys / 8 : 2][2];
        if constexpr (kBiasesAreStaged) biases.load<kRowsAreKeys>(pairs);
        const ScoreRule rule(p_);
        const float factor = rule.factor(), left_out = rule.left_out() * kUnit;
        const int num_keys = kRowsAreKeys ? num_rows() : num_columns();
        for_each_element(stats, column, [&](const QueryStats& query, int key, int step, int n, int i) {
            float& x = weights[step][n][i];
            const float mapped = rule.mapped(x), lse = query.lse - left_out;
            float above = multiply_add(mapped, factor, -lse);
            if constexpr (!kScoresAreMultiples) {
                float bias;
                if constexpr (kBiasesAreStaged) {
                    const uint32_t pair = pairs[step][n][Arch::row_of_element(i)];
                    bias = Element::widen(static_cast<uint16_t>(pair >> 16 * Arch::column_of_element(i)));
                } else {
                    bias = bias_of(p_, query.row, key, key < num_keys);
                }
                const float distance = static_cast<float>(key - query.row.diagonal);
                above = multiply_add(mapped, factor, alibi_of(query.row.slope, distance) + bias) - lse;
            }
            x = exp2_approximate(at_most_zero(above) * kLog2OfMax);
            if constexpr (kHasBias) x *= query.share;
            if constexpr (kSoftcaps) slopes[step][n][i] = ScoreRule::slope(mapped);
        });
    }

    // Turns gradients of weights into gradients of products.
    FA_DEVICE void differentiate(Scores& grads, const Scores& weights, const Scores& slopes, uint32_t stats,
                                 int column) const {
        for_each_element(stats, column, [&](const QueryStats& query, int, int step, int n, int i) {
            float& x = grads[step][n][i];
            x = weights[step][n][i] * (x - query.delta);
            if constexpr (kSoftcaps) x *= slopes[step][n][i];
        });
    }

    // Does the same with dropout, which multiplies the weights before their product with values, and therefore their
    // gradients. It is a template, as not all tiles allow dropout.
    template <int kTiles>
    FA_DEVICE void drop(float (&weights)[kSteps][kTiles][Arch::kElements], Scores& grads, const Scores& slopes,
                        uint32_t stats, int column) const {
        const KeptWeights<Arch, kRowsAreKeys, kSteps, kTiles> kept(Dropout(p_, work_.batch, head_), column,
                                                                   [&](int step, int which) { return row_of(step, which); });
        const auto factor = [&](int step, int n, int i) { return kept(step, n, i) ? p_.dropout_factor : 0.0f; };
        const auto for_each = [&](auto visit) {
#pragma unroll
            for (int step = 0; step < kSteps; ++step)
#pragma unroll
                for (int n = 0; n < kTiles; ++n)
#pragma unroll
                    for (int i = 0; i < Arch::kElements; ++i) visit(step, n, i);
        };
        if constexpr (kGradFirst) {
            for_each([&](int step, int n, int i) { grads[step][n][i] *= factor(step, n, i); });
            differentiate(grads, weights, slopes, stats, column);
        }
        if constexpr (kGradSecond) for_each([&](int step, int n, int i) { weights[step][n][i] *= factor(step, n, i); });
    }

    // acc += scores times the rows of a tile. left: where all warps have left these scores, if they share out columns.
    template <int kColumns, int kTiles, class Path = Arch>
    FA_DEVICE void multiply(float (&acc)[kSteps][kTiles][Arch::kElements], const Scores& scores, uint32_t left,
                            uint32_t tile) const {
        const int first_column = work_.first_column + column_warp() * (kColumns / kColumnWarps);
        const typename Path::template Values<kColumns> values(tile + first_column * Arch::kSharedBytes);
        if constexpr (kColumnWarps > 1) {
            const typename Path::SharedProbabilities rows(left + first_warp_row() * kProbabilityPitch);
#pragma unroll
            for (int group = 0; group < kTileN / Arch::kKeyStep; ++group) values.accumulate(acc, rows, group);
        } else {
#pragma unroll
            for (int group = 0; group < kTileN / Arch::kKeyStep; ++group) values.accumulate(acc, scores, group);
        }
    }

    template <int kColumns, int kTiles>
    FA_DEVICE void write(const float (&acc)[kSteps][kTiles][Arch::kElements], uint16_t* to, int columns, uint32_t shared,
                         float factor) const {
        constexpr int kPitch = pitch_of<2>(kColumns), kColumnsOfWarp = kColumns / (kValueParts * kColumnWarps);
        const uint32_t rows = shared + first_warp_row() * kPitch;
        const int first_in_shared = column_warp() * kColumnsOfWarp, first_column = work_.first_column;
        leave_rows<Arch, kPitch>(acc, rows, first_in_shared, [&](int, int) { return factor; });
        warp_barrier();
        // Gradients are contiguous.
        const int64_t heads = kRowsAreKeys ? p_.nheads / p_.group_size : p_.nheads;
        const int64_t first = kRowsAreKeys ? first_token_of_all(p_.cu_seqlens_k, work_.batch, p_.seqlen_k)
                                           : first_token_of_all(p_.cu_seqlens_q, work_.batch, p_.seqlen_q);
        const int64_t at = (first + warp_row_) * heads + (kRowsAreKeys ? work_.kv_head : work_.head);
        copy_rows<kWarpRows, kColumnsOfWarp, kPitch>(
            {to + at * columns + first_column, heads * columns, last_row_ + 1 - warp_row_, columns - first_column}, rows,
            first_in_shared);
    }

    const BackwardParams& params_;
    const AttentionParams& p_;
    const Work& work_;
    const BasicTileRange<int>& mask_;
    const int last_row_, warp_row_;
    int head_;
    float slope_;  // of ALiBi, of that head

    typename Arch::template Rows<kSteps, kHeaddim> first_;
    typename Arch::template Rows<kSteps, kHeaddimV> second_;
    float grad_first_[kSteps][kGradFirst ? kHeaddim / (kValueParts * kColumnWarps) / 8 : 1][Arch::kElements];
    float grad_second_[kSteps][kGradSecond ? kHeaddimV / (kValueParts * kColumnWarps) / 8 : 1][Arch::kElements];
    uint32_t stats_shared_;  // the stats of rows that are queries, in shared memory
};

}  // namespace fastattention
