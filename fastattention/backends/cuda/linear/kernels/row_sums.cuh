// Sums over the rows of a state, which the lanes and warps of a CTA divide among themselves.
#pragma once

#include "intrinsics.cuh"

namespace fastattention {

// kLanes neighbouring lanes share a row, four columns each. A warp has several rows at a time, and each warp has others.
// There are kProducts sums for each column.
template <int kLanes, int kWarps, int kProducts>
class RowSums {
    static constexpr int kFours = kProducts * kLanes + 1;  // fours of sums per warp: for its columns, and one for the rows
    static constexpr int kBufferBytes = kWarps * kFours * 16;

public:
    static constexpr int kBytes = kWarps > 1 ? 2 * kBufferBytes : 0;
    static_assert(kFours <= 32, "each is stored by another lane");

    // warp: the index of this warp.
    FA_DEVICE explicit RowSums(int warp) : warp_(warp) {}

    // of_rows: up to four sums that belong to no column. Every lane gets the sums of its own columns.
    FA_DEVICE void add_up(float (&of_columns)[kProducts][4], float (&of_rows)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int product = 0; product < kProducts; ++product) add_up_lanes(of_columns[product][i]);
            add_up_lanes(of_rows[i]);
        }
        if constexpr (kWarps > 1) {
            store(of_columns, of_rows);
            cta_barrier();
#pragma unroll
            for (int product = 0; product < kProducts; ++product)
                load(of_columns[product], product * kLanes + lane_index() % kLanes);
            load(of_rows, kProducts * kLanes);
            // The next sums go to the other buffer. Before this one is used again, all warps pass the barrier in between, so
            // they have read these sums.
            buffer_ ^= 1;
        }
    }

private:
    static FA_DEVICE void add_up_lanes(float& x) {
#pragma unroll
        for (int distance = kLanes; distance < 32; distance *= 2) x += shuffle_xor(x, distance);
    }

    FA_DEVICE uint32_t address(int warp, int four) const {
        return shared_memory() + static_cast<uint32_t>(buffer_ * kBufferBytes + (warp * kFours + four) * 16);
    }

    // Lanes of different rows have the same sums, so each stores one kind of them.
    FA_DEVICE void store(const float (&of_columns)[kProducts][4], const float (&of_rows)[4]) const {
        const int kind = lane_index() / kLanes;
        Words4 words;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float x = of_rows[i];
#pragma unroll
            for (int product = 0; product < kProducts; ++product) x = kind == product ? of_columns[product][i] : x;
            words.word[i] = as_bits(x);
        }
        if (lane_index() < kFours) store_shared_128(address(warp_, lane_index()), words);
    }

    // Adds in the same order in all warps, so that all get the same sums. Eight loads at once would take too many registers.
    FA_DEVICE void load(float (&sums)[4], int four) const {
#pragma unroll 4
        for (int warp = 0; warp < kWarps; ++warp) {
            const Words4 words = load_shared_128(address(warp, four));
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[i] = warp == 0 ? as_float(words.word[i]) : sums[i] + as_float(words.word[i]);
        }
    }

    const int warp_;
    int buffer_ = 0;
};

}  // namespace fastattention
