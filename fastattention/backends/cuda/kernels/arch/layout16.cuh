// Which lane holds what of an accumulator of 16 query rows by 8 columns, on every path but Volta's: lane l holds columns
// 2 (l % 4) and the next, of row l / 4 (elements 0, 1) and of row l / 4 + 8 (elements 2, 3).
#pragma once

#include "../probability_exchange.cuh"

namespace fastattention {

struct Layout16 {
    static constexpr int kStepRows = 16;  // query rows of a step
    static constexpr int kElements = 4;   // of an accumulator, in one lane

    // Which of a lane's two rows of a step an element is in; that row; the column of an element of accumulator `tile`.
    static FA_DEVICE constexpr int row_of_element(int i) { return i / 2; }
    static FA_DEVICE int row(int which) { return lane_index() / 4 + 8 * which; }
    static FA_DEVICE int score_column(int tile, int i) { return tile * 8 + lane_index() % 4 * 2 + i % 2; }
    static FA_DEVICE int value_column(int tile, int i) { return score_column(tile, i); }
    // The lane whose rows are neighbours of this one's: the next for even rows, the ones before for odd rows.
    static constexpr int kNeighbour = 4;  // what its number differs in
    // Which of a lane's columns of a tile it is in.
    static FA_DEVICE constexpr int column_of_element(int i) { return i % 2; }

    template <class Combine>
    static FA_DEVICE float reduce_row(float x, Combine combine) {
        x = combine(x, shuffle_xor(x, 1));
        return combine(x, shuffle_xor(x, 2));
    }
};

}  // namespace fastattention
