// Attention forward of one tile of query rows: the keys go by tile by tile, scores and probabilities live in registers, and
// an online softmax keeps a running maximum and sum of each row.
//
// A warp has kSteps x Arch::kStepRows rows to itself and shares nothing with the others but the tiles in shared memory.
#pragma once

#include FA_ARCH_HEADER

#include "scores.cuh"
#include "work.cuh"

namespace fastattention {

constexpr int kSteps = kTileM / (kWarps * Arch::kStepRows);
constexpr int kWarpRows = kSteps * Arch::kStepRows;
static_assert(kSteps * kWarps * Arch::kStepRows == kTileM, "warps must share the rows evenly");
static_assert(kTileN % Arch::kKeyStep == 0 && kHeaddim % 16 == 0 && kHeaddimV % 16 == 0, "products take so many at once");

using QueryCopy = TileCopy<Arch, kTileM, kHeaddim>;
using KeyCopy = TileCopy<Arch, kTileN, kHeaddim>;
using ValueCopy = TileCopy<Arch, kTileN, kHeaddimV>;

// Rows of the output pass through the memory of the queries, 16 bits each.
constexpr int kOutPitch = pitch_of<2>(kHeaddimV);
constexpr int kQueryBytes = QueryCopy::kBytes > kTileM * kOutPitch ? QueryCopy::kBytes : kTileM * kOutPitch;
constexpr int kSharedMemory = kQueryBytes + kStages * (KeyCopy::kBytes + ValueCopy::kBytes);
static_assert(kSharedMemory == FA_SHARED_BYTES, "heuristics.py computes the same");

class ForwardTile {
public:
    FA_DEVICE ForwardTile(const ForwardParams& p, const Work& work, const BasicTileRange<int>& mask)
        : p_(p),
          work_(work),
          mask_(mask),
          first_row_(work.m_tile * kTileM),
          last_row_(smaller(first_row_ + kTileM, mask_.seqlen_q) - 1),
          warp_row_(first_row_ + warp_index() * kWarpRows),
          seen_(mask_.rows(warp_row_, smaller(warp_row_ + kWarpRows - 1, last_row_))),
          key_begin_(mask_.row_begin(first_row_) / kTileN * kTileN),
          key_end_(mask_.row_end(last_row_)),
          q_rows_(query_rows(p, work, mask.seqlen_q)),
          k_rows_(cache_rows(p, work, mask.seqlen_k, p.k, p.k_stride_batch, p.k_stride_row, p.k_stride_head, p.headdim)),
          v_rows_(cache_rows(p, work, mask.seqlen_k, p.v + work.first_column, p.v_stride_batch, p.v_stride_row,
                             p.v_stride_head, p.headdim_v - work.first_column)),
          q_shared_(shared_memory()),
          k_shared_(q_shared_ + kQueryBytes),
          v_shared_(k_shared_ + kStages * KeyCopy::kBytes),
          scale_log2_(kModifiesScores ? 1.0f : p.softmax_scale * kLog2E) {}

    FA_DEVICE void run() {
        clear();
        if (key_begin_ < key_end_) {
            if constexpr (Arch::kAsyncCopy && kStages == 2) {
                run_double_buffered();
            } else {
                run_single_buffered();
            }
        }
        finish();
    }

private:
    static FA_DEVICE int smaller(int a, int b) { return a < b ? a : b; }

    FA_DEVICE void clear() {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
#pragma unroll
            for (int which = 0; which < 2; ++which) {
                row_max_[step][which] = -infinity();
                row_sum_[step][which] = 0.0f;
            }
#pragma unroll
            for (int n = 0; n < kHeaddimV / 8; ++n)
#pragma unroll
                for (int i = 0; i < Arch::kElements; ++i) acc_o_[step][n][i] = 0.0f;
        }
    }

    // Two tiles of keys and values in shared memory: while one is worked on, the next is on its way. One barrier a tile
    // says both that this tile has arrived and that nobody reads the one before it any more.
    FA_DEVICE void run_double_buffered() {
        QueryCopy q_copy(q_rows_);
        KeyCopy k_copy(k_rows_);
        ValueCopy v_copy(v_rows_);
        q_copy.begin(first_row_, q_shared_);
        k_copy.begin(key_begin_, k_shared_);
        v_copy.begin(key_begin_, v_shared_);
        copy_async_commit();
        copy_async_wait<0>();
        block_barrier();
        queries_.load(q_shared_ + warp_index() * kWarpRows * QueryCopy::kPitch);
        int stage = 0;
        for (int key = key_begin_; key < key_end_; key += kTileN, stage ^= 1) {
            if (key + kTileN < key_end_) {
                k_copy.begin(key + kTileN, k_shared_ + (stage ^ 1) * KeyCopy::kBytes);
                v_copy.begin(key + kTileN, v_shared_ + (stage ^ 1) * ValueCopy::kBytes);
            }
            copy_async_commit();
            const TileKind kind = kind_of(key);
            if (kind != TileKind::kSkipped) {
                multiply_queries(k_shared_ + stage * KeyCopy::kBytes);
                accumulate_values(key, kind, v_shared_ + stage * ValueCopy::kBytes);
            }
            copy_async_wait<0>();
            block_barrier();
        }
    }

    // One tile of keys and one of values: the values arrive while keys are worked on, and the other way round. No barrier
    // parts the softmax from the product with the values, so that the exponentials of some keys overlap the products of others.
    FA_DEVICE void run_single_buffered() {
        QueryCopy q_copy(q_rows_);
        KeyCopy k_copy(k_rows_);
        ValueCopy v_copy(v_rows_);
        q_copy.begin(first_row_, q_shared_);
        k_copy.begin(key_begin_, k_shared_);
        q_copy.finish(q_shared_);
        arrive(k_copy, k_shared_);
        queries_.load(q_shared_ + warp_index() * kWarpRows * QueryCopy::kPitch);
        for (int key = key_begin_; key < key_end_; key += kTileN) {
            v_copy.begin(key, v_shared_);
            const TileKind kind = kind_of(key);
            if (kind != TileKind::kSkipped) multiply_queries(k_shared_);
            arrive(v_copy, v_shared_);
            const bool more = key + kTileN < key_end_;
            if (more) k_copy.begin(key + kTileN, k_shared_);
            if (kind != TileKind::kSkipped) accumulate_values(key, kind, v_shared_);
            if (more) arrive(k_copy, k_shared_);
        }
    }

    // Everyone is done with what lay in the place of this copy before: each waited at a barrier since.
    template <class Copy>
    FA_DEVICE void arrive(const Copy& copy, uint32_t to) {
        copy.finish(to);
        if constexpr (Arch::kAsyncCopy) {
            copy_async_commit();
            copy_async_wait<0>();
        }
        block_barrier();
    }

    // What the rows of this warp see of a tile of keys.
    FA_DEVICE TileKind kind_of(int key) const {
        if (warp_row_ > last_row_) return TileKind::kSkipped;
        return seen_.classify(key, key + kTileN - 1);
    }

    // acc_s_ = q k^T for a tile of keys.
    FA_DEVICE void multiply_queries(uint32_t k_shared) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
#pragma unroll
            for (int n = 0; n < kTileN / 8; ++n)
#pragma unroll
                for (int i = 0; i < Arch::kElements; ++i) acc_s_[step][n][i] = 0.0f;
        Arch::template multiply_queries<kSteps>(acc_s_, queries_, k_shared);
    }

    // Scores become probabilities relative to the running maxima, which are raised first; acc_o_ += p v.
    FA_DEVICE void accumulate_values(int key, TileKind kind, uint32_t v_shared) {
        if constexpr (kModifiesScores) modify(key);
        if (kind != TileKind::kFull) {
            if (mask_.left < 0) {
                hide<false>(key);
            } else {
                hide<true>(key);
            }
        }
        raise_maxima();
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
#pragma unroll
            for (int which = 0; which < 2; ++which) exponentiate(step, which);
        Arch::template accumulate_values<kSteps>(acc_o_, acc_s_, v_shared);
    }

    FA_DEVICE int row_of(int step, int which) const { return warp_row_ + step * Arch::kStepRows + Arch::row(which); }

    FA_DEVICE void modify(int key) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
#pragma unroll
            for (int which = 0; which < 2; ++which) {
                const ScoreRow row = score_row(smaller(row_of(step, which), last_row_));
#pragma unroll
                for (int n = 0; n < kTileN / 8; ++n)
#pragma unroll
                    for (int i = 0; i < Arch::kElements; ++i)
                        if (Arch::row_of_element(i) == which) {
                            const int column = key + Arch::score_column(n, i);
                            float& s = acc_s_[step][n][i];
                            s = modified_score(p_, row, s, column, column < mask_.seqlen_k);
                        }
            }
    }

    FA_DEVICE ScoreRow score_row(int row) const {
        ScoreRow result{nullptr, 0.0f, row + mask_.seqlen_k - mask_.seqlen_q};
        if (p_.alibi_slopes != nullptr) result.slope = p_.alibi_slopes[work_.batch * p_.alibi_stride_batch + work_.head];
        if (p_.attn_bias != nullptr) {
            const int64_t offset = work_.batch * p_.bias_stride_batch + work_.head * p_.bias_stride_head +
                                   (first_token(p_.cu_seqlens_q, work_.batch) + row) * p_.bias_stride_row;
            result.bias = static_cast<const char*>(p_.attn_bias) + offset * (p_.bias_is_float ? 4 : 2);
        }
        return result;
    }

    // Scores outside the mask, or past the last key, become -infinity.
    template <bool kHasLeft>
    FA_DEVICE void hide(int key) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
#pragma unroll
            for (int which = 0; which < 2; ++which) {
                const int row = computed_here(warp_row_) + step * Arch::kStepRows + Arch::row(which);
                const int begin = kHasLeft ? mask_.row_begin(row) - key : 0;
                const int end = mask_.row_end(row) - key;
#pragma unroll
                for (int n = 0; n < kTileN / 8; ++n)
#pragma unroll
                    for (int i = 0; i < Arch::kElements; ++i)
                        if (Arch::row_of_element(i) == which) {
                            const int column = Arch::score_column(n, i);
                            if ((kHasLeft && column < begin) || column >= end) acc_s_[step][n][i] = -infinity();
                        }
            }
    }

    // Probabilities are relative to row_max_, which may stay below the highest score by kSlack: what was accumulated needs
    // to be rescaled only when a score is higher by more, which after the first tiles is rare.
    FA_DEVICE void raise_maxima() {
        constexpr float kSlack = 8.0f;  // probabilities up to 2^8: far from overflow, as exact as those up to 1
        float highest[kSteps][2];
        bool raised = false;
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
#pragma unroll
            for (int which = 0; which < 2; ++which) {
                highest[step][which] = highest_score(step, which) * scale_log2_;
                raised |= highest[step][which] > row_max_[step][which] + kSlack;
            }
        if (!any_lane(raised)) return;
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
#pragma unroll
            for (int which = 0; which < 2; ++which) {
                const float new_max = maximum(row_max_[step][which], highest[step][which]);
                rescale(step, which, exp2_approximate(row_max_[step][which] - shift_of(new_max)));
                row_max_[step][which] = new_max;
            }
    }

    // Of a row that has seen no key yet: with any finite shift, -inf becomes 0 and a NaN is not lost.
    static FA_DEVICE float shift_of(float row_max) { return row_max == -infinity() ? 0.0f : row_max; }

    FA_DEVICE float highest_score(int step, int which) const {
        float highest = acc_s_[step][0][first_element(which)];
#pragma unroll
        for (int n = 0; n < kTileN / 8; ++n)
#pragma unroll
            for (int i = 0; i < Arch::kElements; ++i)
                if (Arch::row_of_element(i) == which) highest = maximum(highest, acc_s_[step][n][i]);
        return Arch::reduce_row(highest, [](float a, float b) { return maximum(a, b); });
    }

    FA_DEVICE void rescale(int step, int which, float factor) {
        row_sum_[step][which] *= factor;
#pragma unroll
        for (int n = 0; n < kHeaddimV / 8; ++n)
#pragma unroll
            for (int i = 0; i < Arch::kElements; ++i)
                if (Arch::row_of_element(i) == which) acc_o_[step][n][i] *= factor;
    }

    FA_DEVICE void exponentiate(int step, int which) {
        const float shift = shift_of(row_max_[step][which]);
        float sum = row_sum_[step][which];
#pragma unroll
        for (int n = 0; n < kTileN / 8; ++n)
#pragma unroll
            for (int i = 0; i < Arch::kElements; ++i)
                if (Arch::row_of_element(i) == which) {
                    float& s = acc_s_[step][n][i];
                    s = exp2_approximate(s * scale_log2_ - shift);
                    sum += s;
                }
        row_sum_[step][which] = sum;
    }

    static FA_DEVICE constexpr int first_element(int which) {
        for (int i = 0; i < Arch::kElements; ++i)
            if (Arch::row_of_element(i) == which) return i;
        return 0;
    }

    // Divides, adds the sink to the denominator, and writes out and lse.
    FA_DEVICE void finish() {
        // The memory of the queries becomes that of the output: since the last of them was read, all met at a barrier.
        const uint32_t warp_out = q_shared_ + warp_index() * kWarpRows * kOutPitch;
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
#pragma unroll
            for (int which = 0; which < 2; ++which) finish_row(step, which, warp_out);
        warp_barrier();
        copy_out(warp_out);
    }

    FA_DEVICE void finish_row(int step, int which, uint32_t warp_out) {
        float row_max = row_max_[step][which];
        float row_sum = Arch::reduce_row(row_sum_[step][which], [](float a, float b) { return a + b; });
        float scale = 1.0f;
        if (p_.sinks != nullptr) {
            const float sink = p_.sinks[work_.head] * kLog2E;
            const float highest = larger(row_max, sink);
            if (highest != -infinity()) {
                scale = exp2_approximate(row_max - highest);
                row_sum = row_sum * scale + exp2_approximate(sink - highest);
                row_max = highest;
            }
        }
        const float factor = row_sum == 0.0f ? 0.0f : scale * reciprocal_approximate(row_sum);
        const int row = step * Arch::kStepRows + Arch::row(which);
#pragma unroll
        for (int n = 0; n < kHeaddimV / 8; ++n)
#pragma unroll
            for (int i = 0; i < Arch::kElements; i += 2)
                if (Arch::row_of_element(i) == which)
                    store_shared_32(warp_out + row * kOutPitch + Arch::value_column(n, i) * 2,
                                    Element::pack(acc_o_[step][n][i] * factor, acc_o_[step][n][i + 1] * factor));
        const bool writes_lse = p_.lse != nullptr && work_.first_column == 0 && Arch::score_column(0, 0) == 0;
        if (writes_lse && warp_row_ + row <= last_row_) {
            const float lse = row_sum == 0.0f ? -infinity() : (row_max + log2_approximate(row_sum)) * kLn2;
            p_.lse[work_.batch * p_.lse_stride_batch + work_.head * p_.lse_stride_head +
                   first_token(p_.cu_seqlens_q, work_.batch) + warp_row_ + row] = lse;
        }
    }

    FA_DEVICE void copy_out(uint32_t warp_out) {
        constexpr int kChunks = kHeaddimV / 8;
        uint16_t* out = p_.out + work_.batch * p_.out_stride_batch + work_.head * p_.out_stride_head + work_.first_column +
                        first_token(p_.cu_seqlens_q, work_.batch) * p_.out_stride_row;
        for (int i = lane_index(); i < kWarpRows * kChunks; i += 32) {
            const int row = i / kChunks, column = i % kChunks * 8;
            if (warp_row_ + row > last_row_ || column >= p_.headdim_v - work_.first_column) continue;
            store_global_128(out + static_cast<int64_t>(warp_row_ + row) * p_.out_stride_row + column,
                             load_shared_128(warp_out + row * kOutPitch + column * 2));
        }
    }

    const ForwardParams& p_;
    const Work& work_;
    const BasicTileRange<int>& mask_;
    const int first_row_, last_row_, warp_row_;
    const RowsRange<int> seen_;  // by this warp
    const int key_begin_, key_end_;
    const SourceRows q_rows_, k_rows_, v_rows_;
    const uint32_t q_shared_, k_shared_, v_shared_;
    const float scale_log2_;

    typename Arch::template Queries<kSteps> queries_;
    float acc_s_[kSteps][kTileN / 8][Arch::kElements];
    float acc_o_[kSteps][kHeaddimV / 8][Arch::kElements];
    float row_max_[kSteps][2];  // in log2 units
    float row_sum_[kSteps][2];  // of this lane's columns
};

}  // namespace fastattention

extern "C" FA_KERNEL void FA_LAUNCH_BOUNDS(fastattention::kThreads, FA_MIN_BLOCKS)
    fastattention_forward(FA_PARAMETER fastattention::ForwardParams params) {
    using namespace fastattention;
    const Work work = find_work(params);
    const BasicTileRange<int> mask = mask_of(params, work.batch);
    if (work.m_tile * kTileM >= mask.seqlen_q) return;
    ForwardTile(params, work, mask).run();
}
