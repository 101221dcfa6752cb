// The query rows of a warp: their scores, softmax and results, all in registers.
#pragma once

#include "bias_tiles.cuh"
#include "epilogue.cuh"
#include "hidden_pairs.cuh"
#include "mask.cuh"
#include "online_softmax.cuh"
#include "tile_walk.cuh"

namespace fastattention {

static_assert(kTileN % Arch::kKeyStep == 0 && kHeaddim % 16 == 0 && kHeaddimV % 16 == 0, "products take so many at once");

static_assert(!kMixesBlocks || kColumnWarps == 1, "warps that exchange probabilities skip no tile");

static_assert(!kInt8Products || Config::keys_of_scale % kTileN == 0, "a tile has one scale");

// Rows of the output, in 16 bits, are staged in the shared memory of the queries.
constexpr int kOutPitch = pitch_of<2>(kHeaddimV);

// kSteps x Arch::kStepRows rows. They share only the tiles in shared memory with other warps.
class WarpRows {
public:
    using Softmax = OnlineSoftmax<kSteps>;
    using Scores = Softmax::Scores;
    using Biases = BiasTiles<Arch, kWarpRows, kTileN, kRowWarps>;

    // last_row: the CTA's last row that exists.
    FA_DEVICE WarpRows(const AttentionParams& p, const Work& work, const BasicTileRange<int>& mask, int last_row)
        : p_(p),
          work_(work),
          mask_(mask),
          last_row_(last_row),
          warp_row_(work.m_tile * kTileM + first_warp_row()),
          seen_(mask_.rows(token_of(p, warp_row_), token_of(p, smaller(warp_row_ + kWarpRows - 1, last_row_)))),
          rule_(p),
          slope_(kGroupedRows ? 0.0f : alibi_slope(p, work.batch, work.head)),
          softmax_(kScoresAreMultiples ? rule_.factor() : 1.0f) {
        clear();
        if constexpr (kInt8Products) {
            for_each_row([&](int step, int which, int) { query_scale_[step][which] = of_queries(p.q_scale, step, which); });
        }
    }

    // q_shared: the CTA's queries.
    FA_DEVICE void load_queries(uint32_t q_shared) {
        queries_.load(q_shared + first_warp_row() * pitch_of<Arch::kSharedBytes>(kHeaddim));
    }

    // How much these rows see of a tile of keys. Warps that exchange probabilities skip no tile: all must reach the barrier.
    FA_DEVICE TileKind kind_of(int key) const {
        if (warp_row_ > last_row_) return kColumnWarps > 1 ? TileKind::kPartial : TileKind::kSkipped;
        if constexpr (kMixesBlocks) {
            if (!block_grid(p_, work_.batch, work_.head).keeps(warp_row_, key)) return TileKind::kSkipped;
        }
        const TileKind kind = seen_.classify(key, key + kTileN - 1);
        return kColumnWarps > 1 && kind == TileKind::kSkipped ? TileKind::kPartial : kind;
    }

    // scores, which are zero, += q k^T for a tile of keys, the one at `key`.
    FA_DEVICE void multiply_queries(Scores& scores, uint32_t k_shared, int key) {
        if constexpr (kInt8Products) {
            key_scale_ = p_.k_scale[work_.batch * p_.k_scale_stride_batch + work_.kv_head * p_.k_scale_stride_head +
                                    key / Config::keys_of_scale];
            fill(scores, as_float(kInt8Origin));
        }
        if constexpr (kStartsFromAlibi) start_from_alibi(scores, key + first_warp_key());
        Arch::multiply_rows(scores, queries_, k_shared);
    }

    // Everything up to the exponentials: score_mod, mask, and the running maxima of the online softmax.
    FA_DEVICE void prepare_scores(Scores& scores, const LaneScales& scales, const StagedBiases& biases, int tile_key,
                                  TileKind kind) {
        const int key = tile_key + first_warp_key();
        if constexpr (kQuantized) scale(scores, scales);
        if constexpr (kInt8Products) scale_products(scores);
        if constexpr (kModifiesScores && !kStartsFromAlibi) score_mod(scores, biases, key);
        if constexpr (kScoresAreMultiples) {
            if (softmax_.multiplies_first()) {
                if constexpr (!kScoresHaveOrigin) softmax_.set_max_of_scores(rule_.factor());
                softmax_.multiply(scores);
            }
        }
        if (kind != TileKind::kFull)
            apply_mask<Arch>(scores, mask_, key, -infinity(), [&](int step, int which) {
                return token_of(p_, opaque(warp_row_) + step * Arch::kStepRows + Arch::row(which));
            });
        if constexpr (kBlockSparse) {
            if (p_.tile_index != nullptr && warp_row_ <= last_row_)
                hide_pairs<Arch, false>(scores, p_, work_.batch, work_.head, opaque(warp_row_), key, -infinity());
        }
        if constexpr (kColumnWarps == 1) online_max(scores, scales);
    }

    // Turns scores into probabilities relative to the running maxima, and acc_o_ += p v, a few keys at a time.
    FA_DEVICE void accumulate_values(Scores& scores, const LaneScales& scales, int tile_key, uint32_t v_shared) {
        const Kept kept = kept_of(tile_key);
        const typename Arch::template Values<kValueRow> values(v_shared);
#pragma unroll
        for (int group = 0; group < kTileN / Arch::kKeyStep; ++group) {
            softmax_.template exponentiate<kTilesOfStep>(scores, scores, softmax_.sums(), scales, group * kTilesOfStep, kept);
            values.accumulate(acc_o_, scores, group);
        }
    }

    // Stores the probabilities of this warp's keys for the other warps. It is also a barrier for what threads stored or
    // copied before. Probabilities relative to the old maxima suffice unless some warp has found a much higher score. A
    // template, like the next function, as not all architectures have this.
    template <class Path = Arch>
    FA_DEVICE void exchange_probabilities(Scores& scores, const LaneScales& scales, int tile_key, uint32_t exchange) {
        const Kept kept = kept_of(tile_key);
        float highest[kSteps][2], sums[kSteps][2];
        const bool raised = softmax_.find_highest(highest, scores, scales);
        leave_probabilities<Path>(sums, scores, scales, kept, exchange);
        if (any_thread(raised)) {
            exchange_maxima(highest, exchange);
            check_maxima(scores);
            leave_probabilities<Path>(sums, scores, scales, kept, exchange);
            cta_barrier();
        }
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
#pragma unroll
            for (int which = 0; which < 2; ++which) softmax_.sums()[step][which] += sums[step][which];
    }

    // acc_o_ += p v, with the probabilities that all warps have stored.
    template <class Path = Arch>
    FA_DEVICE void accumulate_exchanged(uint32_t exchange, uint32_t v_shared) {
        const typename Path::template Values<kValueRow> values(v_shared, first_warp_column());
        const typename Path::SharedProbabilities probabilities(exchange + first_warp_row() * kProbabilityPitch);
#pragma unroll
        for (int group = 0; group < kTileN / Path::kKeyStep; ++group) values.accumulate(acc_o_, probabilities, group);
    }

    // Adds up the sums of warps that had different keys.
    FA_DEVICE void exchange_sums(uint32_t exchange) {
        const RowExchange of_rows(exchange);
        for_each_row([&](int step, int which, int row) { leave(of_rows, row, softmax_.total(step, which)); });
        cta_barrier();
        for_each_row([&](int step, int which, int row) {
            softmax_.sums()[step][which] = is_first_of_row() ? of_rows.combined(row, Softmax::add) : 0.0f;
        });
    }

    // The results become NaN.
    FA_DEVICE void set_nan() {
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
#pragma unroll
            for (int which = 0; which < 2; ++which) softmax_.sums()[step][which] = quiet_nan();
    }

    // Stores the maximum and the sum of each row in shared memory, 8 bytes per row.
    FA_DEVICE void leave_stats(uint32_t to) const {
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
#pragma unroll
            for (int which = 0; which < 2; ++which) {
                const float sum = softmax_.total(step, which);
                const uint32_t at = to + (first_warp_row() + step * Arch::kStepRows + Arch::row(which)) * 8;
                if (column_warp() == 0 && is_first_of_row()) {
                    store_shared_32(at, as_bits(softmax_.max(step, which)));
                    store_shared_32(at + 4, as_bits(sum));
                }
            }
    }

    // Stores kColumns accumulated columns, starting at kColumns * part, in shared memory as floats, `pitch` bytes per row.
    template <int kColumns>
    FA_DEVICE void leave_values(uint32_t to, int pitch, int part) const {
        static_assert(kColumns % 16 == 0, "the lanes' columns of 16 neighbours are those of two accumulators");
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
#pragma unroll
            for (int n = 0; n < kWarpColumns / 8; ++n) {
                if ((first_warp_column() / 8 + n) / (kColumns / 8) != part) continue;
#pragma unroll
                for (int i = 0; i < Arch::kElements; ++i) {
                    const int row = first_warp_row() + step * Arch::kStepRows + Arch::row(Arch::row_of_element(i));
                    const int column = first_warp_column() + Arch::value_column(n, i) - part * kColumns;
                    if (warp_row_ - first_warp_row() + row <= last_row_)
                        store_shared_32(to + row * pitch + column * 4, as_bits(acc_o_[step][n][i]));
                }
            }
    }

    // Writes out and lse. The output is staged in q_shared: all threads have passed a barrier since queries were read there.
    FA_DEVICE void finish(uint32_t q_shared) {
        const uint32_t warp_out = q_shared + first_warp_row() * kOutPitch;
        leave_rows<Arch, kOutPitch>(acc_o_, warp_out, first_warp_column(),
                                    [&](int step, int which) { return finish_row(step, which); });
        warp_barrier();
        uint16_t* out = p_.out + work_.batch * p_.out_stride_batch + work_.head * p_.out_stride_head + work_.first_column +
                        (first_token(p_.cu_seqlens_q, work_.batch) + warp_row_) * p_.out_stride_row;
        copy_rows<kWarpRows, kWarpColumns, kOutPitch>(
            {out, p_.out_stride_row, last_row_ + 1 - warp_row_, p_.headdim_v - work_.first_column}, warp_out,
            first_warp_column());
    }

private:
    static constexpr int kTilesOfStep = Arch::kKeyStep / 8;
    using Kept = Softmax::Kept;

    // Dropout of the warp's keys of a tile.
    FA_DEVICE Kept kept_of(int tile_key) const {
        return Kept(p_, work_.batch, work_.head, tile_key + first_warp_key(),
                    [&](int step, int which) { return row_of(step, which); });
    }

    // Whether this lane has the first columns of its rows.
    FA_DEVICE static bool is_first_of_row() { return Arch::score_column(0, 0) == 0; }

    // Calls `visit` for each row of this lane, with its index among the rows of the CTA.
    template <class Visit>
    FA_DEVICE static void for_each_row(Visit visit) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
#pragma unroll
            for (int which = 0; which < 2; ++which)
                visit(step, which, first_warp_row() + step * Arch::kStepRows + Arch::row(which));
    }

    FA_DEVICE void clear() {
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
#pragma unroll
            for (int n = 0; n < kWarpColumns / 8; ++n)
#pragma unroll
                for (int i = 0; i < Arch::kElements; ++i) acc_o_[step][n][i] = 0.0f;
    }

    // The value of a row in a tensor that is laid out as lse. Rows that do not exist get the value of the last row.
    FA_DEVICE float of_queries(const float* numbers, int step, int which) const {
        if constexpr (!kInt8Products) return 0.0f;
        return numbers[work_.batch * p_.lse_stride_batch + work_.head * p_.lse_stride_head +
                       first_token(p_.cu_seqlens_q, work_.batch) + smaller(row_of(step, which), last_row_)];
    }

    FA_DEVICE static void fill(Scores& scores, float x) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
#pragma unroll
            for (int n = 0; n < kWarpKeys / 8; ++n)
#pragma unroll
                for (int i = 0; i < Arch::kElements; ++i) scores[step][n][i] = x;
    }

    // Turns products of int8 into scores, or gives the softmax the factor that does.
    FA_DEVICE void scale_products(Scores& scores) {
        const bool finite = key_scale_ == key_scale_;
        if (!finite) fill(scores, quiet_nan());  // the mask is applied afterwards, so hidden scores are not NaN
        for_each_row([&](int step, int which, int) {
            const float times = query_scale_[step][which] * (finite ? key_scale_ : 1.0f);
            if constexpr (kModifiesScores) {
                const float shift = of_queries(p_.q_shift, step, which);
#pragma unroll
                for (int n = 0; n < kWarpKeys / 8; ++n)
#pragma unroll
                    for (int i = 0; i < Arch::kElements; ++i)
                        if (Arch::row_of_element(i) == which)
                            scores[step][n][i] = (scores[step][n][i] - as_float(kInt8Origin)) * times + shift;
            } else {
                // Neither 0 nor NaN, as hidden scores are -infinity. finish_row handles queries that are not finite.
                constexpr float kSmallest = 1.17549435e-38f;
                const float max_of_score = times * (p_.softmax_scale * kLog2E);
                softmax_.set_max_of_score(step, which, max_of_score >= kSmallest ? max_of_score : kSmallest);
            }
        });
    }

    FA_DEVICE int row_of(int step, int which) const { return warp_row_ + step * Arch::kStepRows + Arch::row(which); }

    FA_DEVICE static void scale(Scores& scores, const LaneScales& scales) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
#pragma unroll
            for (int n = 0; n < kWarpKeys / 8; ++n)
#pragma unroll
                for (int i = 0; i < Arch::kElements; ++i) scores[step][n][i] = scales.scaled_score(scores[step][n][i], n, i);
    }

    FA_DEVICE void start_from_alibi(Scores& scores, int key) const {
        for_each_pair(key, [&](const ScoreRow& row, int, float distance, int step, int n, int i) {
#pragma unroll
            for (int j = 0; j < 2; ++j) scores[step][n][i + j] = alibi_of(row.slope, distance + j);
        });
    }

    FA_DEVICE void score_mod(Scores& scores, const StagedBiases& biases, int key) const {
        if constexpr (kStagesBias) {
            if (biases.exist) return modify<BiasLoads::kStaged>(scores, biases, key);
        }
        if constexpr (kHasBias) {
            const BiasLoads loads = bias_loads(p_, key + kWarpKeys);
            if (loads == BiasLoads::kPairs) return modify<BiasLoads::kPairs>(scores, biases, key);
            if (loads == BiasLoads::kFloatPairs) return modify<BiasLoads::kFloatPairs>(scores, biases, key);
        }
        modify<BiasLoads::kEach>(scores, biases, key);
    }

    template <BiasLoads kLoads>
    FA_DEVICE void modify(Scores& scores, const StagedBiases& staged, int key) const {
        const float factor = rule_.factor();
        for_each_pair(key, [&](const ScoreRow& row, int column, float distance, int step, int n, int i) {
            float biases[2];
            if constexpr (kLoads == BiasLoads::kStaged) {
                widen_biases(staged.pair(step * Arch::kStepRows + Arch::row(Arch::row_of_element(i)), column), biases);
            } else {
                read_biases<kLoads>(p_, row, key + column, mask_.seqlen_k, biases);
            }
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                float& s = scores[step][n][i + j];
                s = rule_.mapped(s);
                if constexpr (!kScoresAreMultiples)
                    s = multiply_add(s, factor, alibi_of(row.slope, distance + j) + biases[j]);
            }
        });
    }

    // Calls visit(row, column, distance, step, n, i) for each two neighbours of a row of scores: the column of the first in the
    // tile at `key`, and its distance from the diagonal, which only calls with ALiBi need.
    template <class Visit>
    FA_DEVICE void for_each_pair(int key, Visit visit) const {
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
#pragma unroll
            for (int which = 0; which < 2; ++which) {
                const int index = smaller(row_of(step, which), last_row_), head = head_of(p_, work_, index);
                const float slope = kGroupedRows ? alibi_slope(p_, work_.batch, head) : slope_;
                const ScoreRow row =
                    score_row(p_, work_.batch, head, slope, token_of(p_, index), mask_.seqlen_q, mask_.seqlen_k);
                // Columns differ from the lane's first by constants.
                const int first = Arch::score_column(0, 0);
                const float first_distance = static_cast<float>(key + first - row.diagonal);
#pragma unroll
                for (int n = 0; n < kWarpKeys / 8; ++n)
#pragma unroll
                    for (int i = 0; i < Arch::kElements; i += 2)
                        if (Arch::row_of_element(i) == which) {
                            const int column = Arch::score_column(n, i);
                            visit(row, column, first_distance + static_cast<float>(column - first), step, n, i);
                        }
            }
    }

    FA_DEVICE void online_max(Scores& scores, const LaneScales& scales) {
        float highest[kSteps][2];
        if (!any_lane(softmax_.find_highest(highest, scores, scales))) return;
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
#pragma unroll
            for (int which = 0; which < 2; ++which) raise_max(step, which, highest[step][which]);
        check_maxima(scores);
    }

    // Multiplies these and all later scores first if exponents need it.
    FA_DEVICE void check_maxima(Scores& scores) {
        if constexpr (kScoresAreMultiples) {
            if (!softmax_.multiplies_first() && any_lane(softmax_.has_large_max())) softmax_.multiply(scores);
        }
    }

    FA_DEVICE void raise_max(int step, int which, float highest) {
        const float factor = softmax_.raise_max(step, which, highest);
#pragma unroll
        for (int n = 0; n < kWarpColumns / 8; ++n)
#pragma unroll
            for (int i = 0; i < Arch::kElements; ++i)
                if (Arch::row_of_element(i) == which) acc_o_[step][n][i] *= factor;
    }

    // Stores a value that all lanes of a row have, except for the sign of a zero.
    FA_DEVICE static void leave(const RowExchange& of_rows, int row, float x) {
        if (is_first_of_row()) of_rows.leave(row, x);
    }

    // Raises the running maxima to the highest that any of the warps with these rows has found.
    FA_DEVICE void exchange_maxima(const float (&highest)[kSteps][2], uint32_t exchange) {
        const RowExchange of_rows(exchange);
        for_each_row([&](int step, int which, int row) { leave(of_rows, row, highest[step][which]); });
        cta_barrier();
        for_each_row([&](int step, int which, int row) {
            raise_max(step, which, of_rows.combined(row, [](float a, float b) { return maximum(a, b); }));
        });
    }

    template <class Path>
    FA_DEVICE void leave_probabilities(float (&sums)[kSteps][2], const Scores& scores, const LaneScales& scales,
                                       const Kept& kept, uint32_t exchange) const {
        Scores probabilities;
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
#pragma unroll
            for (int which = 0; which < 2; ++which) sums[step][which] = 0.0f;
        softmax_.template exponentiate<kWarpKeys / 8>(probabilities, scores, sums, scales, 0, kept);
        Path::leave_probabilities(exchange + first_warp_row() * kProbabilityPitch, probabilities);
    }

    // Writes lse and returns the factor that normalizes the row, from its sum with the sink.
    FA_DEVICE float finish_row(int step, int which) {
        float highest = softmax_.max(step, which), sum = softmax_.total(step, which);
        if constexpr (kInt8Products && !kModifiesScores) {
            // Sinks and lse refer to scores that include the shift.
            if (p_.q_shift != nullptr && highest != -infinity())
                highest += of_queries(p_.q_shift, step, which) * (p_.softmax_scale * kLog2E);
            const bool finite = query_scale_[step][which] == query_scale_[step][which];
            if (!finite && sum > 0.0f) sum = quiet_nan();
        }
        const Finished result = finished(p_, work_.head, highest, sum);
        const int row = step * Arch::kStepRows + Arch::row(which);
        const bool has_lse = work_.first_column == 0 && column_warp() == 0 && is_first_of_row();
        const bool writes_lse = p_.lse != nullptr && has_lse;
        if (writes_lse && warp_row_ + row <= last_row_) {
            p_.lse[work_.batch * p_.lse_stride_batch + work_.head * p_.lse_stride_head +
                   first_token(p_.cu_seqlens_q, work_.batch) + warp_row_ + row] = result.lse;
        }
        return result.factor;
    }

    const AttentionParams& p_;
    const Work& work_;
    const BasicTileRange<int>& mask_;
    const int last_row_, warp_row_;
    const RowsRange<int> seen_;
    const ScoreRule rule_;
    const float slope_;  // of ALiBi, if all rows have the same head

    typename Arch::template Rows<kSteps, kHeaddim> queries_;
    float acc_o_[kSteps][kWarpColumns / 8][Arch::kElements];
    Softmax softmax_;
    float query_scale_[kInt8Products ? kSteps : 1][2], key_scale_;  // scales of products in int8; key_scale_ is a tile's
};

}  // namespace fastattention
