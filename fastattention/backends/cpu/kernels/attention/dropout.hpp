// Decides which weights dropout keeps, by the seed and a weight's position alone, as defined in backends/common/dropout.py.
#pragma once

namespace FA_NAMESPACE {

// Sixteen counters serve kDropoutKeys neighbouring keys: word w of counter i belongs to key 16 w + i.
static constexpr int64_t kDropoutCounters = 16, kDropoutWords = 4;

struct Dropout {
    uint32_t threshold;  // weights whose word is at least this are kept
    float factor;        // multiplies weights that are kept
    uint32_t seed[2];

    static Dropout of(const FaAttentionParams& p) {
        if (p.dropout_p == 0.0) return {};
        const auto seed = static_cast<uint64_t>(*p.dropout_seed);
        const auto threshold = static_cast<uint32_t>(p.dropout_p * 0x1p32 + 0.5);
        return {threshold,
                static_cast<float>(1.0 / (1.0 - p.dropout_p)),
                {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)}};
    }
};

// Philox4x32 of seven rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
FA_INLINE void philox(Integers (&counter)[kDropoutWords], uint32_t key0, uint32_t key1) {
    constexpr int kRounds = 7;
    for (int round = 0; round < kRounds; ++round) {
        Integers high0, low0, high1, low1;
        multiply_wide(counter[0], 0xd2511f53u, high0, low0);
        multiply_wide(counter[2], 0xcd9e8d57u, high1, low1);
        counter[0] = high1 ^ counter[1] ^ broadcast_integer(key0);
        counter[1] = low1;
        counter[2] = high0 ^ counter[3] ^ broadcast_integer(key1);
        counter[3] = low0;
        key0 += 0x9e3779b9u;
        key1 += 0xbb67ae85u;
    }
}

// factors[j] = the factor of the weight of key first_key + j, for j < n; first_key and n are multiples of kDropoutKeys.
// batch, at: the position of the query.
static void dropout_factors(const Dropout& dropout, int64_t batch, QueryRow at, int64_t first_key, int64_t n,
                            float* factors) {
    const Vec kept = broadcast(dropout.factor);
    for (int64_t j = 0; j < n; j += kDropoutKeys) {
        const int64_t first_counter = (first_key + j) / kDropoutKeys * kDropoutCounters;
        for (int64_t i = 0; i < kDropoutCounters; i += Vec::kWidth) {
            Integers counter[kDropoutWords] = {
                integers_from(static_cast<uint32_t>(first_counter + i)), broadcast_integer(static_cast<uint32_t>(at.token)),
                broadcast_integer(static_cast<uint32_t>(at.head)), broadcast_integer(static_cast<uint32_t>(batch))};
            philox(counter, dropout.seed[0], dropout.seed[1]);
            for (int64_t w = 0; w < kDropoutWords; ++w)
                store(factors + j + w * kDropoutCounters + i, select_below(counter[w], dropout.threshold, zero(), kept));
        }
    }
}

}  // namespace FA_NAMESPACE
