// Turns products q . k into scores for the softmax: scale, softcap, ALiBi and bias.
#pragma once

#include "work.cuh"

namespace fastattention {

// The modifiers of the scores of one row, a query token of a query head.
struct ScoreRow {
    const char* bias;  // bias of key 0, or null
    float slope;       // ALiBi slope, 0 if off
    int diagonal;      // the key from which ALiBi measures the distance
};

// token: of a sequence with seqlen_q queries and seqlen_k keys.
FA_DEVICE ScoreRow score_row(const AttentionParams& p, int batch, int head, int token, int seqlen_q, int seqlen_k) {
    ScoreRow result{nullptr, 0.0f, token + seqlen_k - seqlen_q};
    if (p.alibi_slopes != nullptr) result.slope = p.alibi_slopes[batch * p.alibi_stride_batch + head];
    if (p.attn_bias != nullptr) {
        const int64_t offset = batch * p.bias_stride_batch + head * p.bias_stride_head +
                               (first_token(p.cu_seqlens_q, batch) + token) * p.bias_stride_row;
        result.bias = static_cast<const char*>(p.attn_bias) + offset * (p.bias_is_float ? 4 : 2);
    }
    return result;
}

// Running maxima of rows are in log2 units if nothing modifies scores: softmax_scale and the change of base are then one
// multiplication. Modified scores and their maxima are natural, as in log2 units the lowest bias would not be finite.
constexpr float kLog2OfMax = kModifiesScores ? kLog2E : 1.0f;
constexpr float kNaturalOfMax = kModifiesScores ? 1.0f : kLn2;

// The factor of what was accumulated relative to a lower maximum.
FA_DEVICE float rescaling(float old_max, float new_max) {
    return exp2_approximate((old_max - shift_of(new_max)) * kLog2OfMax);
}

// slope: the derivative of value by the product times softmax_scale.
struct ModifiedScore {
    float value, slope;
};

FA_DEVICE ModifiedScore modified_score(const AttentionParams& p, const ScoreRow& row, float product, int key, bool in_range) {
    float s = product * p.softmax_scale, slope = 1.0f;
    if (p.softcap != 0.0f) {
        const float capped = tanh_exact(s / p.softcap);
        s = p.softcap * capped;
        slope = 1.0f - capped * capped;
    }
    if (row.slope != 0.0f) {
        const int distance = key - row.diagonal;
        s -= row.slope * static_cast<float>(distance < 0 ? -distance : distance);
    }
    if (row.bias != nullptr && in_range) {
        const int64_t offset = key * p.bias_stride_key;
        s += p.bias_is_float ? reinterpret_cast<const float*>(row.bias)[offset]
                             : Element::widen(reinterpret_cast<const uint16_t*>(row.bias)[offset]);
    }
    return {s, slope};
}

}  // namespace fastattention
