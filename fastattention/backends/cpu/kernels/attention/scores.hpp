// Turns raw products q . k into scores for the softmax: scale, softcap, ALiBi and bias. Also defines their weights.
#pragma once

namespace FA_NAMESPACE {

// The modifiers of the scores of one row, a query token of a query head.
struct ScoreRow {
    float scale;        // softmax_scale
    float softcap;      // 0 is off
    float slope;        // ALiBi slope; 0 if off
    int64_t diagonal;   // the key on the row's diagonal: ALiBi measures the distance from it
    const char* bias;   // bias of key 0, or null
    int64_t bias_stride;  // from key to key, in bytes
    int64_t bias_dtype;
};

// Whether scores are more than products times a positive number of usual size.
FA_INLINE bool modifies_scores(const FaAttentionParams& p) {
    const bool usual = p.softmax_scale > 1e-30 && p.softmax_scale < 1e30;
    return p.softcap != 0.0 || p.alibi_slopes != nullptr || p.attn_bias != nullptr || !usual;
}

// Units of a call's scores and of the running maxima of its rows. If nothing modifies scores they stay products: the scale
// and the change of base are then one multiplication inside the exponential. Modified scores are natural.
struct ScoreUnits {
    bool modified;
    float natural;  // from scores to natural ones
    float log2;     // from scores to log2 units

    static ScoreUnits of(const FaAttentionParams& p) {
        if (modifies_scores(p)) return {true, 1.0f, kLog2E};
        const float scale = static_cast<float>(p.softmax_scale);
        return {false, scale, scale * kLog2E};
    }

    // What the weights of a row with this maximum are relative to. A row that has seen no key has the reference 0, so -inf
    // becomes 0 and a NaN is not lost.
    static Vec reference(Vec max) { return select_less(max, broadcast(-kLargest), zero(), max); }

    // Weights, lane by lane. The difference comes first: a product of the maximum alone would be rounded, by hundreds for
    // maxima beyond 1e9.
    template <bool kPrecise>
    Vec weight(Vec score, Vec reference) const {
        return exp2<kPrecise>((score - reference) * broadcast(log2));
    }

    // The factor of what was accumulated relative to a lower maximum.
    float rescaling(float old_max, float new_max) const { return exp2((old_max - new_max) * log2); }
};

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

// Returns the natural scores of a vector of raw products with keys from `key` on, of which n exist. slope: set to the
// derivative of a score by its scaled product, which differs from 1 under a softcap; null if not needed.
FA_INLINE Vec modified_scores(const ScoreRow& row, Vec products, int64_t key, int64_t n, Vec* slope = nullptr) {
    Vec s = products * broadcast(row.scale);
    if (slope) *slope = broadcast(1.0f);
    if (row.softcap != 0.0f) {
        const Vec bent = tanh(s * broadcast(1.0f / row.softcap));
        if (slope) *slope = broadcast(1.0f) - bent * bent;
        s = broadcast(row.softcap) * bent;
    }
    if (row.slope != 0.0f) {
        const Vec distance = absolute(broadcast(static_cast<float>(key - row.diagonal)) + iota());
        s = fma(broadcast(-row.slope), distance, s);
    }
    if (row.bias) s = s + bias_of(row, key, static_cast<int>(smaller(n, Vec::kWidth)));
    return s;
}

// Turns scores[i], the raw products with keys first_key + i for i < n, into natural scores, in whole vectors.
static void modify_scores(const ScoreRow& row, float* scores, int64_t first_key, int64_t n) {
    for (int64_t i = 0; i < n; i += Vec::kWidth)
        store(scores + i, modified_scores(row, load(scores + i), first_key + i, n - i));
}

}  // namespace FA_NAMESPACE
