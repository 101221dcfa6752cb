// From raw products q . k to the scores that enter the softmax, in log2 units: scale, softcap, ALiBi and bias.
#pragma once

namespace FA_NAMESPACE {

// What the scores of one row (a query token of a query head) need.
struct ScoreRow {
    float scale;        // softmax_scale
    float softcap;      // 0 is off
    float slope;        // ALiBi; 0 without
    int64_t diagonal;   // the key on the row's diagonal: ALiBi measures the distance from it
    const char* bias;   // bias of key 0, or null
    int64_t bias_stride;  // of a key, in bytes
    int64_t bias_dtype;
};

FA_INLINE bool modifies_scores(const FaAttentionParams& p) {
    return p.softcap != 0.0 || p.alibi_slopes != nullptr || p.attn_bias != nullptr;
}

FA_INLINE ScoreRow score_row(const Call& call, const Sequence& s, int64_t token, int64_t head) {
    const FaAttentionParams& p = *call.params;
    const int64_t bias_size = p.bias_dtype == FA_FLOAT32 ? 4 : 2;
    ScoreRow row;
    row.scale = static_cast<float>(p.softmax_scale);
    row.softcap = static_cast<float>(p.softcap);
    row.slope = s.alibi ? s.alibi[head] : 0.0f;
    row.diagonal = token + s.mask.seqlen_k - s.mask.seqlen_q;
    row.bias = s.bias ? s.bias + (head * p.bias_stride_head + token * p.bias_stride_row) * bias_size : nullptr;
    row.bias_stride = p.bias_stride_key * bias_size;
    row.bias_dtype = p.bias_dtype;
    return row;
}

template <class Element>
FA_INLINE Vec load_bias(const char* bias, int64_t stride, int n) {
    if (stride == static_cast<int64_t>(sizeof(Element))) return load_partial(reinterpret_cast<const Element*>(bias), n);
    Element gathered[Vec::kWidth] = {};
    for (int i = 0; i < n; ++i) memcpy(&gathered[i], bias + i * stride, sizeof(Element));
    return load(gathered);
}

FA_INLINE Vec bias_of(const ScoreRow& row, int64_t key, int n) {
    const char* bias = row.bias + key * row.bias_stride;
    if (row.bias_dtype == FA_FLOAT32) return load_bias<float>(bias, row.bias_stride, n);
    if (row.bias_dtype == FA_BFLOAT16) return load_bias<Bfloat16>(bias, row.bias_stride, n);
    return load_bias<Float16>(bias, row.bias_stride, n);
}

// scores[i], the raw products of keys first_key + i for i < n, become scores in log2 units. `scores` has room for whole
// vectors.
static void modify_scores(const ScoreRow& row, float* scores, int64_t first_key, int64_t n) {
    const Vec slope = broadcast(-row.slope);
    for (int64_t i = 0; i < n; i += Vec::kWidth) {
        Vec s = load(scores + i) * broadcast(row.scale);
        if (row.softcap != 0.0f) s = broadcast(row.softcap) * tanh(s * broadcast(1.0f / row.softcap));
        if (row.slope != 0.0f) {
            const Vec distance = absolute(broadcast(static_cast<float>(first_key + i - row.diagonal)) + iota());
            s = fma(slope, distance, s);
        }
        if (row.bias) s = s + bias_of(row, first_key + i, static_cast<int>(smaller(n - i, Vec::kWidth)));
        // A finite score stays finite, however low: a row whose keys all have the lowest bias is their mean, not empty.
        const Vec scaled = maximum(broadcast(-kLargest), s * broadcast(kLog2E));  // in this order a NaN stays
        store(scores + i, select_less(s, broadcast(-kLargest), s, scaled));
    }
}

}  // namespace FA_NAMESPACE
