// Decides which weights dropout keeps, by the seed and a weight's position alone, as defined in backends/common/dropout.py.
#pragma once

namespace FA_NAMESPACE {

// Eight counters serve 32 neighbouring keys: word w of counter i belongs to key 8 w + i.
static constexpr int64_t kDropoutCounters = 8, kDropoutWords = 4;
static_assert(kDropoutKeys % (Vec::kWidth * kDropoutWords) == 0 && kDropoutKeys % (kDropoutCounters * kDropoutWords) == 0);

struct Dropout {
    uint32_t threshold;  // its upper half: the lowest number of weights that are kept
    float factor;        // multiplies weights that are kept
    uint32_t seed[2];

    bool drops() const { return factor != 0.0f; }

    static Dropout of(const FaAttentionParams& p) {
        if (p.dropout_p == 0.0) return {};
        const auto seed = static_cast<uint64_t>(*p.dropout_seed);
        return {static_cast<uint32_t>(p.dropout_threshold) << 16,
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

// Stores the factors of one word of neighbouring counters. to: the place of the first
FA_INLINE void store_by_counter(float* to, Vec factors) {
    if constexpr (Vec::kWidth <= kDropoutCounters) {
        store(to, factors);
    } else {
        float of_groups[Vec::kWidth];
        store(of_groups, factors);
        for (int64_t j = 0; j < Vec::kWidth / kDropoutCounters; ++j)
            __builtin_memcpy(to + j * kDropoutCounters * kDropoutWords, of_groups + j * kDropoutCounters,
                             kDropoutCounters * sizeof(float));
    }
}

// factors[j] = the factor of the weight of key first_key + j, for j < n; first_key and n are multiples of kDropoutKeys.
// batch, at: the position of the query, which has one half of each word.
static void dropout_factors(const Dropout& dropout, int64_t batch, QueryRow at, int64_t first_key, int64_t n,
                            float* factors) {
    const Vec kept = broadcast(dropout.factor);
    const auto query = static_cast<uint32_t>(at.token / 16 * 8 + at.token % 8);
    const int to_upper = at.token & 8 ? 0 : 16;
    for (int64_t i = 0; i < n / kDropoutWords; i += Vec::kWidth) {
        Integers counter[kDropoutWords] = {integers_from(static_cast<uint32_t>(first_key / kDropoutWords + i)),
                                           broadcast_integer(query), broadcast_integer(static_cast<uint32_t>(at.head)),
                                           broadcast_integer(static_cast<uint32_t>(batch))};
        philox(counter, dropout.seed[0], dropout.seed[1]);
        float* to = factors + i / kDropoutCounters * kDropoutCounters * kDropoutWords + i % kDropoutCounters;
        for (int64_t w = 0; w < kDropoutWords; ++w)
            store_by_counter(to + w * kDropoutCounters,
                             select_below(shift_left(counter[w], to_upper), dropout.threshold, zero(), kept));
    }
}

}  // namespace FA_NAMESPACE
