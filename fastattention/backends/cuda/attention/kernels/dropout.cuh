// Decides which weights dropout keeps, by the seed and a weight's position alone, as defined in backends/common/dropout.py.
#pragma once

#include "attention_variant.cuh"
#include "params.h"

namespace fastattention {

// A counter serves four keys and two queries, 8 apart each. Word w belongs to key w of the four; its lower half is that of
// the first query.
struct DropoutWords {
    uint32_t word[4];

    FA_DEVICE uint32_t of(int key) const {
        const uint32_t low = key & 8 ? word[1] : word[0], high = key & 8 ? word[3] : word[2];
        return key & 16 ? high : low;
    }
};

// Dropout of one head of one sequence.
class Dropout {
public:
    FA_DEVICE Dropout(const AttentionParams& p, int batch, int head) : batch_(batch), head_(head) {
        const int64_t seed = *p.dropout_seed;
        seed_[0] = static_cast<uint32_t>(seed);
        seed_[1] = static_cast<uint32_t>(seed >> 32);
        threshold_ = static_cast<uint32_t>(p.dropout_threshold);
    }

    // Philox4x32 of seven rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
    FA_DEVICE DropoutWords words(int query, int key) const {
        constexpr int kRounds = 7;
        const uint32_t of_key = static_cast<uint32_t>(key), of_query = static_cast<uint32_t>(query);
        uint32_t counter[4] = {of_key / 32 * 8 + of_key % 8, of_query / 16 * 8 + of_query % 8, static_cast<uint32_t>(head_),
                               static_cast<uint32_t>(batch_)};
        uint32_t key0 = seed_[0], key1 = seed_[1];
#pragma unroll
        for (int round = 0; round < kRounds; ++round) {
            const uint32_t high0 = multiply_high(counter[0], 0xd2511f53u), low0 = counter[0] * 0xd2511f53u;
            const uint32_t high1 = multiply_high(counter[2], 0xcd9e8d57u), low1 = counter[2] * 0xcd9e8d57u;
            counter[0] = high1 ^ counter[1] ^ key0;
            counter[1] = low1;
            counter[2] = high0 ^ counter[3] ^ key1;
            counter[3] = low0;
            key0 += 0x9e3779b9u;
            key1 += 0xbb67ae85u;
        }
        return {{counter[0], counter[1], counter[2], counter[3]}};
    }

    // By how much a query's half of a word moves to be the upper one. What lies below it does not matter.
    static FA_DEVICE constexpr int shift_of(int query) { return 16 - (query & 8) * 2; }

    FA_DEVICE bool keeps(uint32_t word, int shift) const { return word << shift >= threshold_; }

private:
    int batch_, head_;
    uint32_t seed_[2], threshold_;
};

// One bit for each weight that a lane holds: whether it is kept. kKeysAreRows: keys are rows, otherwise columns.
template <class Arch, bool kKeysAreRows, int kSteps, int kTiles>
class KeptWeights {
public:
    // of_row(step, which): the query, or key, of one of a lane's rows; first_column: the key, or query, of column 0.
    template <class OfRow>
    FA_DEVICE KeptWeights(const Dropout& dropout, int first_column, OfRow of_row) {
        if constexpr (kKeysAreRows) {
            find_by_row(dropout, first_column, of_row);
        } else {
            find_by_column(dropout, first_column, of_row);
        }
    }

    FA_DEVICE bool operator()(int step, int n, int i) const {
        return bits_[step][n / kTilesOfWord] >> shift_of_bit(n, i) & 1;
    }

private:
    static constexpr int kTilesOfWord = 32 / Arch::kElements;
    static constexpr int kKeys = kKeysAreRows ? kSteps * Arch::kStepRows : kTiles * 8;
    static constexpr int kQueries = kKeysAreRows ? kTiles * 8 : kSteps * Arch::kStepRows;
    static_assert(kKeys % 32 == 0 || 32 % kKeys == 0, "a counter serves four keys among 32");
    static_assert(kQueries % 16 == 0 || kQueries == 8, "a counter serves two queries among 16");
    static constexpr bool kRowsShare = Arch::kRowGap == 8;  // whether both rows of a lane share counters

    static FA_DEVICE constexpr int shift_of_bit(int n, int i) { return n % kTilesOfWord * Arch::kElements + i; }

    FA_DEVICE void set(int step, int n, int i, bool kept) {
        bits_[step][n / kTilesOfWord] |= static_cast<uint32_t>(kept) << shift_of_bit(n, i);
    }

    // Calls `visit` with the elements of a lane that have counters of their own in a tile of eight columns.
    template <class Visit>
    static FA_DEVICE void for_each_counter(Visit visit) {
#pragma unroll
        for (int i = 0; i < Arch::kElements; ++i)
            if (!(kRowsShare && Arch::row_of_element(i) == 1)) visit(i);
    }

    template <class OfRow>
    FA_DEVICE void find_by_column(const Dropout& dropout, int first_column, OfRow query_of_row) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
#pragma unroll
            for (int first = 0; first < kTiles; first += 4)
                for_each_counter([&](int i) {
                    const int query = query_of_row(step, Arch::row_of_element(i));
                    const DropoutWords words = dropout.words(query, first_column + Arch::score_column(first, i));
#pragma unroll
                    for (int n = first; n < first + 4 && n < kTiles; ++n) {
                        const uint32_t word = kKeys % 32 == 0 ? words.word[n % 4] : words.of(first_column + n * 8);
                        if constexpr (kRowsShare) {
                            set(step, n, i, dropout.keeps(word, Dropout::shift_of(0)));
                            set(step, n, i + Arch::kElements / 2, dropout.keeps(word, Dropout::shift_of(8)));
                        } else {
                            set(step, n, i, dropout.keeps(word, Dropout::shift_of(query)));
                        }
                    }
                });
    }

    template <class OfRow>
    FA_DEVICE void find_by_row(const Dropout& dropout, int first_column, OfRow key_of_row) {
        constexpr int kStepsOfCounter = 32 / Arch::kStepRows;
#pragma unroll
        for (int first = 0; first < kTiles; first += 2)
#pragma unroll
            for (int first_step = 0; first_step < kSteps; first_step += kStepsOfCounter)
                for_each_counter([&](int i) {
                    const int query = first_column + Arch::score_column(first, i), which = Arch::row_of_element(i);
                    const DropoutWords words = dropout.words(query, key_of_row(first_step, which));
#pragma unroll
                    for (int n = first; n < first + 2 && n < kTiles; ++n) {
                        const int shift = Dropout::shift_of(kQueries % 16 == 0 ? n * 8 : query);
#pragma unroll
                        for (int step = first_step; step < first_step + kStepsOfCounter && step < kSteps; ++step)
#pragma unroll
                            for (int other = 0; other < (kRowsShare ? 2 : 1); ++other) {
                                const uint32_t word = kRowsShare && kKeys % 32 == 0
                                                          ? words.word[(step - first_step) * 2 + other]
                                                          : words.of(key_of_row(step, which + other));
                                set(step, n, i + other * Arch::kElements / 2, dropout.keeps(word, shift));
                            }
                    }
                });
    }

    uint32_t bits_[kSteps][(kTiles + kTilesOfWord - 1) / kTilesOfWord] = {};
};

// Dropout of the weights that a lane of a forward holds. It compiles to nothing in kernels without dropout.
template <class Arch, int kSteps, int kTiles, bool kDropsSome = kDrops>
struct DropoutOfLane {
    template <class OfRow>
    FA_DEVICE DropoutOfLane(const AttentionParams&, int, int, int, OfRow) {}
    FA_DEVICE float weight(float p, int, int, int) const { return p; }
};

template <class Arch, int kSteps, int kTiles>
struct DropoutOfLane<Arch, kSteps, kTiles, true> {
    template <class OfRow>
    FA_DEVICE DropoutOfLane(const AttentionParams& p, int batch, int head, int first_key, OfRow query_of_row)
        : kept_(Dropout(p, batch, head), first_key, query_of_row), factor_(p.dropout_factor) {}
    FA_DEVICE float weight(float p, int step, int n, int i) const { return kept_(step, n, i) ? p * factor_ : 0.0f; }

private:
    const KeptWeights<Arch, false, kSteps, kTiles> kept_;
    const float factor_;
};

}  // namespace fastattention
