// The keys of the greatest scores of one query.
#pragma once

#include <cstdint>
#include <cstring>

namespace fastattention {

// An integer whose order is that of scores. NaN is the greatest, and both zeros are one.
inline uint32_t rank_of(float score) {
    if (score != score) return 0xffffffffu;
    score += 0.0f;
    uint32_t bits;
    std::memcpy(&bits, &score, sizeof bits);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// The rank of the count-th greatest score, and how many scores of that rank are among the `count` greatest.
struct Threshold {
    uint32_t rank;
    int64_t ties;
};

// Counts scores by their first bits, and then those with the same first bits by the next ones.
inline Threshold threshold_of(const float* scores, int64_t n, int64_t count) {
    constexpr int kShifts[] = {21, 10, 0}, kBits[] = {11, 11, 10};
    Threshold found{0, count};
    uint32_t known = 0;  // bits of the rank that are found
    for (int pass = 0; pass < 3; ++pass) {
        int64_t counts[1 << 11] = {};
        const uint32_t digits = (1u << kBits[pass]) - 1;
        for (int64_t key = 0; key < n; ++key) {
            const uint32_t rank = rank_of(scores[key]);
            if ((rank & known) == found.rank) ++counts[rank >> kShifts[pass] & digits];
        }
        uint32_t digit = digits;
        for (; found.ties > counts[digit]; --digit) found.ties -= counts[digit];
        found.rank |= digit << kShifts[pass];
        known |= digits << kShifts[pass];
    }
    return found;
}

// Writes `topk` indices: keys in rising order, and then -1. Of keys with one score the first ones win.
inline void write_top_keys(const float* scores, int64_t n, int64_t topk, int32_t* indices) {
    int64_t written = 0;
    if (n <= topk) {
        for (; written < n; ++written) indices[written] = static_cast<int32_t>(written);
    } else {
        Threshold threshold = threshold_of(scores, n, topk);
        for (int64_t key = 0; key < n; ++key) {
            const uint32_t rank = rank_of(scores[key]);
            if (rank < threshold.rank || (rank == threshold.rank && threshold.ties-- <= 0)) continue;
            indices[written++] = static_cast<int32_t>(key);
        }
    }
    for (; written < topk; ++written) indices[written] = -1;
}

}  // namespace fastattention
