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

// In log2 units. A finite score stays finite, however low: a row whose keys all have the lowest bias is their mean, not
// empty.
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
    return s < -kLargest ? s : larger(-kLargest, s * kLog2E);  // in this order a NaN stays
}

}  // namespace fastattention
