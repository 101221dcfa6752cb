// Turns products q . k into scores for the softmax: scale, softcap, ALiBi and bias. Each is compiled only where a call has
// it.
#pragma once

#include "work.cuh"

namespace fastattention {

constexpr bool kSoftcaps = Config::softcaps;
constexpr bool kHasAlibi = Config::has_alibi;
constexpr bool kHasBias = Config::has_bias;
constexpr bool kExtremeScores = Config::extreme_scores;

// The unit of scores and of their running maxima. Powers of two save a multiplication. In that unit the lowest bias would not
// be finite, nor would products with the largest softmax_scale.
constexpr bool kNaturalScores = kHasBias || kExtremeScores;
constexpr float kUnit = kNaturalScores ? 1.0f : kLog2E;  // factor from natural scores
constexpr float kLog2OfMax = kNaturalScores ? kLog2E : 1.0f;
constexpr float kNaturalOfMax = kNaturalScores ? 1.0f : kLn2;

// Whether products start from ALiBi. Added afterwards it would cost a multiplication more, and scores would be no multiples of
// sums. Nothing else may happen to products before.
constexpr bool kStartsFromAlibi = kHasAlibi && !kSoftcaps && !kNaturalScores && !kInt8Products && !kQuantized;

// Whether scores are a number times what `mapped` returns. The softmax multiplies by it in passing.
constexpr bool kScoresAreMultiples = !kNaturalScores && (!kHasAlibi || kStartsFromAlibi);

// The factor of what was accumulated relative to a lower maximum.
FA_DEVICE float rescaling(float old_max, float new_max) {
    return exp2_approximate((old_max - shift_of(new_max)) * kLog2OfMax);
}

// Scores are factor() * mapped(product) + ALiBi + bias + kUnit * left_out(). What is left out is the same for all keys. Where
// kStartsFromAlibi, the product has ALiBi in it.
class ScoreRule {
public:
    FA_DEVICE explicit ScoreRule(const AttentionParams& p) : p_(p) {}

    FA_DEVICE float factor() const {
        if constexpr (kSoftcaps) return p_.softcap * ((kExtremeScores ? 1.0f : 2.0f) * kUnit);
        return p_.softmax_scale * kUnit;
    }

    // With a softcap, tanh(x) = 1 - 2 / (1 + e^2x), of which only -1 / (1 + e^2x) is computed: its error is about 2^-23.
    FA_DEVICE float mapped(float product) const {
        if constexpr (!kSoftcaps) return product;
        if constexpr (kExtremeScores) return tanh_exact(product * p_.softmax_scale / p_.softcap);
        return reciprocal_approximate(-1.0f - exp2_approximate(product * (p_.softmax_scale * (2.0f * kLog2E) / p_.softcap)));
    }

    // The derivative of the capped score by the product times softmax_scale, from what `mapped` returned.
    FA_DEVICE static float slope(float mapped) {
        if constexpr (!kSoftcaps) return 1.0f;
        return kExtremeScores ? 1.0f - mapped * mapped : -4.0f * mapped * (1.0f + mapped);
    }

    // In natural units.
    FA_DEVICE float left_out() const { return kSoftcaps && !kExtremeScores ? p_.softcap : 0.0f; }

private:
    const AttentionParams& p_;
};

// What is added to the scores of one row, a query token of a query head.
struct ScoreRow {
    const char* bias;  // bias of key 0
    float slope;       // ALiBi slope in the unit of what it is added to, negative
    int diagonal;      // the key from which ALiBi measures the distance
};

FA_DEVICE float alibi_slope(const AttentionParams& p, int batch, int head) {
    if constexpr (!kHasAlibi) return 0.0f;
    const float slope = p.alibi_slopes[batch * p.alibi_stride_batch + head];
    return kStartsFromAlibi ? slope / -p.softmax_scale : slope * -kUnit;
}

// token: of a sequence with seqlen_q queries and seqlen_k keys.
FA_DEVICE ScoreRow score_row(const AttentionParams& p, int batch, int head, float slope, int token, int seqlen_q,
                             int seqlen_k) {
    ScoreRow result{nullptr, slope, token + seqlen_k - seqlen_q};
    if constexpr (kHasBias) {
        const int64_t offset = batch * p.bias_stride_batch + head * p.bias_stride_head +
                               (first_token(p.cu_seqlens_q, batch) + token) * p.bias_stride_row;
        result.bias = static_cast<const char*>(p.attn_bias) + offset * (p.bias_is_float ? 4 : 2);
    }
    return result;
}

// distance: of a key from the diagonal, of either sign.
FA_DEVICE float alibi_of(float slope, float distance) {
    if constexpr (!kHasAlibi) return 0.0f;
    return slope * magnitude(distance);
}

// 0 for keys that do not exist.
FA_DEVICE float bias_of(const AttentionParams& p, const ScoreRow& row, int key, bool in_range) {
    if constexpr (!kHasBias) return 0.0f;
    if (!in_range) return 0.0f;
    const int64_t offset = key * p.bias_stride_key;
    return p.bias_is_float ? reinterpret_cast<const float*>(row.bias)[offset]
                           : Element::widen(reinterpret_cast<const uint16_t*>(row.bias)[offset]);
}

// How the biases of a row are read: one at a time, or two neighbours at once, of 16 or 32 bits each. kStaged: two of 16 bits
// from shared memory (bias_tiles.cuh).
enum class BiasLoads { kEach, kPairs, kFloatPairs, kStaged };

// Neighbours are read at once where they lie so, and where all keys before end_key exist in the bias.
FA_DEVICE BiasLoads bias_loads(const AttentionParams& p, int end_key) {
    const int64_t strides = p.bias_stride_batch | p.bias_stride_head | p.bias_stride_row;
    const bool aligned = reinterpret_cast<int64_t>(p.attn_bias) % (p.bias_is_float ? 8 : 4) == 0;
    if (p.bias_stride_key != 1 || strides % 2 != 0 || !aligned || end_key > p.seqlen_k) return BiasLoads::kEach;
    return p.bias_is_float ? BiasLoads::kFloatPairs : BiasLoads::kPairs;
}

FA_DEVICE void widen_biases(uint32_t pair, float (&biases)[2]) {
    biases[0] = Element::widen(static_cast<uint16_t>(pair));
    biases[1] = Element::widen(static_cast<uint16_t>(pair >> 16));
}

// The biases of `key` and its neighbour, from global memory.
template <BiasLoads kLoads>
FA_DEVICE void read_biases(const AttentionParams& p, const ScoreRow& row, int key, int num_keys, float (&biases)[2]) {
    if constexpr (kLoads == BiasLoads::kPairs) {
        widen_biases(load_global_32(row.bias + key * 2), biases);
    } else if constexpr (kLoads == BiasLoads::kFloatPairs) {
        const Words2 pair = load_global_64(row.bias + key * 4);
        biases[0] = as_float(pair.word[0]);
        biases[1] = as_float(pair.word[1]);
    } else {
        biases[0] = bias_of(p, row, key, key < num_keys);
        biases[1] = bias_of(p, row, key + 1, key + 1 < num_keys);
    }
}

}  // namespace fastattention
