// Computes what a backward needs of every query row: lse in the unit of exponents; delta, the product of the result with its
// gradient, less the gradient of lse; and the factor of weights where lse is too coarse. delta is the row's mean gradient of
// scores.
#pragma once

#include "element.cuh"
#include "block_grid.cuh"
#include "lanes.cuh"
#include "numbers.cuh"
#include "params.h"

namespace fastattention {

constexpr int kDeltaWarps = Config::num_warps;
constexpr int kLanesOfRow = Config::lanes_of_row;
constexpr int kRowsOfWarp = 32 / kLanesOfRow;

// Beyond this, lse is too coarse to tell how many keys share a row: its last bit is 8, more than the log of any count.
constexpr float kLargestPlainLse = 1e8f;

struct RowOfCall {
    int batch, head, token;  // when varlen, token counts from the start of the first sequence
};

// The sum of weights, relative to lse, of a row whose scores are all very low, as additive masks make them. Only the bias is
// used: products vanish beside it.
FA_DEVICE float sum_of_weights(const AttentionParams& p, const RowOfCall& row, float lse) {
    int sequence = row.batch, token = row.token, seqlen_q = p.seqlen_q, seqlen_k = p.seqlen_k;
    if (p.cu_seqlens_q != nullptr) {
        while (sequence + 1 < p.batch_size && p.cu_seqlens_q[sequence + 1] <= row.token) ++sequence;
        token -= p.cu_seqlens_q[sequence];
        seqlen_q = p.cu_seqlens_q[sequence + 1] - p.cu_seqlens_q[sequence];
        seqlen_k = p.cu_seqlens_k[sequence + 1] - p.cu_seqlens_k[sequence];
    }
    const int64_t offset = sequence * p.bias_stride_batch + row.head * p.bias_stride_head + row.token * p.bias_stride_row;
    const int diagonal = token + seqlen_k - seqlen_q;
    const int begin = p.window_left < 0 || diagonal < p.window_left ? 0 : diagonal - p.window_left;
    const int end = p.window_right < 0 || diagonal + p.window_right >= seqlen_k ? seqlen_k : diagonal + p.window_right + 1;
    float sum = 0.0f;
    for (int key = begin + lane_index() % kLanesOfRow; key < end; key += kLanesOfRow) {
        if (p.block_mask != nullptr && !block_grid(p, sequence, row.head).keeps(token, key)) continue;
        if (p.tile_index != nullptr && hides_pair(p, sequence, row.head, token, key)) continue;
        const int64_t at = offset + key * p.bias_stride_key;
        const float bias = p.bias_is_float ? static_cast<const float*>(p.attn_bias)[at]
                                           : Element::widen(static_cast<const uint16_t*>(p.attn_bias)[at]);
        sum += exp2_approximate((bias - lse) * kLog2E);
    }
    return sum;
}

FA_DEVICE float delta_of_row(const BackwardParams& params, const RowOfCall& row) {
    const AttentionParams& p = params.call;
    const int64_t first =
        row.batch * p.out_stride_batch + row.head * p.out_stride_head + static_cast<int64_t>(row.token) * p.out_stride_row;
    float sum = 0.0f;
    for (int column = lane_index() % kLanesOfRow * 8; column < p.headdim_v; column += kLanesOfRow * 8) {
        const Words4 out = load_global_128(p.out + first + column), grad = load_global_128(params.grad_out + first + column);
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                sum += Element::widen(static_cast<uint16_t>(out.word[i] >> half * 16)) *
                       Element::widen(static_cast<uint16_t>(grad.word[i] >> half * 16));
    }
    return sum_of_lanes<kLanesOfRow>(sum);
}

}  // namespace fastattention

extern "C" FA_KERNEL void FA_LAUNCH_BOUNDS(fastattention::kDeltaWarps * 32, 1)
    fastattention_delta(FA_PARAMETER fastattention::BackwardParams params) {
    using namespace fastattention;
    const AttentionParams& p = params.call;
    const int tokens = static_cast<int>(p.lse_stride_head);
    const int64_t warp = cta_index() * kDeltaWarps + warp_index();
    const int64_t index = warp * kRowsOfWarp + lane_index() / kLanesOfRow;
    const bool exists = index < params.num_rows;
    const int64_t known = exists ? index : 0, row_of_heads = known / tokens;
    const int batch = static_cast<int>(row_of_heads / p.nheads);
    const RowOfCall row{batch, static_cast<int>(row_of_heads - static_cast<int64_t>(batch) * p.nheads),
                        static_cast<int>(known - row_of_heads * tokens)};
    const float lse = p.lse[known], delta = delta_of_row(params, row);
    const bool has_keys = lse != -infinity();
    const float magnitude = larger(lse, -lse);
    const bool coarse = magnitude > kLargestPlainLse && magnitude < infinity();
    float share = 1.0f, margin = 0.0f;
    if (p.attn_bias != nullptr) {
        const float sum = sum_of_lanes<kLanesOfRow>(coarse ? sum_of_weights(p, row, lse) : 0.0f);
        if (sum > 0.0f) share = 1.0f / sum;
    } else if (coarse) {
        // Products of the backward are summed in another order. As many last bits below lse, a score is the highest.
        margin = magnitude * 1e-6f;
    }
    if (!exists || lane_index() % kLanesOfRow != 0) return;
    params.stats[index] = has_keys ? (lse - margin) * params.exponents_of_lse : infinity();
    params.stats[params.num_rows + index] = delta - (params.grad_lse == nullptr || !has_keys ? 0.0f : params.grad_lse[index]);
    params.stats[2 * params.num_rows + index] = share;
}
