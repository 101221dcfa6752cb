// Merges attention over disjoint parts of the keys by the formula of common/merge.py. A warp merges one row, a token of a
// head, with four columns per lane. It issues all of its loads at once, and no warp waits for another.
#pragma once

#include "columns.cuh"
#include "numbers.cuh"
#include "params.h"

namespace fastattention {

constexpr int kMergeWarps = Config::num_warps;  // per CTA
constexpr int kMergeColumns = Config::columns_of_warp;  // per warp

class Merge {
public:
    using Parts = FormatOf<Config::float32_parts>::Type;
    using Out = FormatOf<Config::float32_out>::Type;

    // index: of the warp, among the warps of all rows.
    FA_DEVICE Merge(const MergeParams& p, int index, int warps_of_row) : p_(p), row_(quotient(index, warps_of_row)) {
        first_column_ = (index - row_ * warps_of_row) * kMergeColumns + lane_index() * 4;
        const int token = quotient(row_, p.nheads);
        head_ = row_ - token * p.nheads;
        batch_ = quotient(token, p.tokens);
        token_ = token - batch_ * p.tokens;
    }

    FA_DEVICE void run() const {
        Parts::Four parts[kMostParts];
        float lses[kMostParts], weights[kMostParts];
#pragma unroll
        for (int i = 0; i < kMostParts; ++i) read(i, lses[i], parts[i]);
        const float lse = weigh(lses, weights);
        float sum[4] = {};
#pragma unroll
        for (int i = 0; i < kMostParts; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j)
                sum[j] += weights[i] * (lses[i] == -infinity() ? 0.0f : Parts::widen(Parts::get(parts[i], j)));
        const int64_t at = static_cast<int64_t>(row_) * p_.headdim_v + first_column_;
        Columns<Out>::write(static_cast<Out::Item*>(p_.out) + at, p_.headdim_v - first_column_, Out::narrow(sum));
        if (first_column_ == 0) p_.lse[(static_cast<int64_t>(batch_) * p_.nheads + head_) * p_.tokens + token_] = lse;
    }

private:
    FA_DEVICE void read(int part, float& lse, Parts::Four& out) const {
        lse = -infinity();
        out = {};
        if (part >= p_.num_parts) return;
        lse = p_.lses[part][batch_ * p_.lses_stride_batch[part] + head_ * p_.lses_stride_head[part] +
                            token_ * p_.lses_stride_row[part]];
        if (lse == infinity()) lse = -infinity();  // flash-attn marks parts without keys like this
        const int64_t at = batch_ * p_.outs_stride_batch[part] + token_ * p_.outs_stride_row[part] +
                           head_ * p_.outs_stride_head[part] + first_column_;
        out = Columns<Parts>::read(static_cast<const Parts::Item*>(p_.outs[part]) + at, p_.headdim_v - first_column_);
    }

    // Computes the weight of each part and returns the lse of all.
    static FA_DEVICE float weigh(const float (&lses)[kMostParts], float (&weights)[kMostParts]) {
        float highest = -infinity();
#pragma unroll
        for (int i = 0; i < kMostParts; ++i) highest = maximum(highest, lses[i]);
        const float shift = shift_of(highest);
        float total = 0.0f;
#pragma unroll
        for (int i = 0; i < kMostParts; ++i) total += weights[i] = exp2_approximate((lses[i] - shift) * kLog2E);
        const bool has_keys = total != 0.0f;
        const float factor = has_keys ? divided(1.0f, total) : 0.0f;
#pragma unroll
        for (int i = 0; i < kMostParts; ++i) weights[i] *= factor;
        return has_keys ? shift + log2_approximate(total) * kLn2 : -infinity();
    }

    const MergeParams& p_;
    const int row_;
    int first_column_, head_, token_, batch_;
};

}  // namespace fastattention

extern "C" FA_KERNEL void FA_LAUNCH_BOUNDS(fastattention::kMergeWarps * 32, 1)
    fastattention_merge(FA_PARAMETER fastattention::MergeParams params) {
    using namespace fastattention;
    // At least one warp: lse is written even if there are no columns.
    const int warps_of_row = params.headdim_v <= kMergeColumns ? 1 : (params.headdim_v + kMergeColumns - 1) / kMergeColumns;
    const int64_t index = cta_index() * kMergeWarps + warp_index();
    if (index >= static_cast<int64_t>(params.batch_size) * params.tokens * params.nheads * warps_of_row) return;
    const Merge merge(params, static_cast<int>(index), warps_of_row);
    wait_for_previous_kernel();
    let_next_kernel_start();
    merge.run();
}
