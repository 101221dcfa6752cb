// Layout of an accumulator of 16 query rows by 8 columns on all architectures but Volta. Lane l holds columns 2 (l % 4) and
// 2 (l % 4) + 1 of row l / 4 (elements 0, 1) and of row l / 4 + 8 (elements 2, 3).
#pragma once

#include "../probability_exchange.cuh"

namespace fastattention {

struct Layout16 {
    static constexpr int kStepRows = Config::step_rows;  // of queries
    static constexpr int kElements = kStepRows / 4;       // of an accumulator, in one lane

    // Which of a lane's two rows of a step holds an element, the index of a row, and the column of an element of a tile.
    static FA_DEVICE constexpr int row_of_element(int i) { return i / 2; }
    static constexpr int kRowGap = 8;  // between the two
    static FA_DEVICE int row(int which) { return lane_index() / 4 + kRowGap * which; }
    static FA_DEVICE int score_column(int tile, int i) { return tile * 8 + lane_index() % 4 * 2 + i % 2; }
    static FA_DEVICE int value_column(int tile, int i) { return score_column(tile, i); }
    static constexpr bool kSplitsColumns = false;  // whether two tiles of values have the even and the odd columns of 16
    // Which of a lane's columns of a tile holds an element.
    static FA_DEVICE constexpr int column_of_element(int i) { return i % 2; }

    // Stores accumulators of multiply_rows as rows of operands, kPitch bytes each.
    template <int kPitch, int kSteps, int kTiles>
    static FA_DEVICE void leave_scores(const float (&acc)[kSteps][kTiles][4], uint32_t to) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
#pragma unroll
            for (int which = 0; which < 2; ++which)
#pragma unroll
                for (int n = 0; n < kTiles; ++n)
                    store_shared_32(to + (step * kStepRows + row(which)) * kPitch + score_column(n, 0) * 2,
                                    Operand::pack(acc[step][n][2 * which], acc[step][n][2 * which + 1]));
    }

    template <class Combine>
    static FA_DEVICE float reduce_row(float x, Combine combine) {
        x = combine(x, shuffle_xor(x, 1));
        return combine(x, shuffle_xor(x, 2));
    }

    // Lanes at this distance have neighbouring rows of a step, an even one first.
    static constexpr int kNextRowLane = 4;

    // Combines the values of all lanes that have the same columns.
    template <class Combine>
    static FA_DEVICE float reduce_column(float x, Combine combine) {
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2) x = combine(x, shuffle_xor(x, distance));
        return x;
    }
};

}  // namespace fastattention
