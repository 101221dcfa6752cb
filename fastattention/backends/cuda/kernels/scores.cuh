// From products q . k to what enters the softmax: scale, softcap, ALiBi and bias, and the mask.
#pragma once

#include "numbers.cuh"
#include "params.h"
#include "variant.cuh"

namespace fastattention {

// What the scores of one row, a query token of a query head, need.
struct ScoreRow {
    const char* bias;  // of key 0, or null
    float slope;       // ALiBi, 0 without
    int diagonal;      // the key from which ALiBi measures the distance
};

// Running maxima of rows are in log2 units where nothing modifies scores: softmax_scale and the change of base are one
// multiplication. Modified scores and their maxima are natural: in log2 units the lowest bias would not be finite.
constexpr float kLog2OfMax = kModifiesScores ? kLog2E : 1.0f;
constexpr float kNaturalOfMax = kModifiesScores ? 1.0f : kLn2;

// Of what was accumulated relative to a lower maximum.
FA_DEVICE float rescaling(float old_max, float new_max) {
    return exp2_approximate((old_max - shift_of(new_max)) * kLog2OfMax);
}

FA_DEVICE float modified_score(const AttentionParams& p, const ScoreRow& row, float product, int key, bool in_range) {
    float s = product * p.softmax_scale;
    if (p.softcap != 0.0f) s = p.softcap * tanh_exact(s / p.softcap);
    if (row.slope != 0.0f) {
        const int distance = key - row.diagonal;
        s -= row.slope * static_cast<float>(distance < 0 ? -distance : distance);
    }
    if (row.bias != nullptr && in_range) {
        const int64_t offset = key * p.bias_stride_key;
        s += p.bias_is_float ? reinterpret_cast<const float*>(row.bias)[offset]
                             : Element::widen(reinterpret_cast<const uint16_t*>(row.bias)[offset]);
    }
    return s;
}

}  // namespace fastattention
