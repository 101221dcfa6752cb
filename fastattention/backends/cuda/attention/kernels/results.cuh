// Computes out and lse from the maxima, sums and unnormalized results of rows.
#pragma once

#include "scores.cuh"
#include "work.cuh"

namespace fastattention {

struct Finished {
    float factor;  // normalizes the accumulated result
    float lse;
};

// Normalizes a row. The sink is added to the denominator here.
FA_DEVICE Finished finished(const AttentionParams& p, int head, float row_max, float row_sum) {
    float scale = 1.0f;
    // In log2 units the largest sink would not be finite.
    row_max = row_max * kNaturalOfMax + ScoreRule(p).left_out();
    if (p.sinks != nullptr) {
        const float sink = p.sinks[head], highest = larger(row_max, sink);
        if (highest != -infinity()) {
            scale = exp2_approximate((row_max - highest) * kLog2E);
            row_sum = row_sum * scale + exp2_approximate((sink - highest) * kLog2E);
            row_max = highest;
        }
    }
    if (row_sum == 0.0f) return {0.0f, -infinity()};
    return {scale * reciprocal_approximate(row_sum), row_max + log2_approximate(row_sum) * kLn2};
}

// The running maximum and sum of a row.
struct RowStats {
    float max, sum;
};

// Writes eight columns of out, starting at `column`, and with column 0 also lse.
FA_DEVICE void write_eight(const AttentionParams& p, int batch, int head, int token, int column, const RowStats& stats,
                           const float (&results)[8]) {
    const Finished result = finished(p, head, stats.max, stats.sum);
    Words4 words;
#pragma unroll
    for (int i = 0; i < 4; ++i)
        words.word[i] = Element::pack(results[2 * i] * result.factor, results[2 * i + 1] * result.factor);
    store_global_128(p.out + batch * p.out_stride_batch + head * p.out_stride_head +
                         static_cast<int64_t>(token) * p.out_stride_row + column,
                     words);
    if (p.lse != nullptr && column == 0) p.lse[batch * p.lse_stride_batch + head * p.lse_stride_head + token] = result.lse;
}

}  // namespace fastattention
