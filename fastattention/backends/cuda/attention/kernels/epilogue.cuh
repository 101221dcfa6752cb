// Writes a warp's accumulators to memory as rows of 16-bit values. They pass through shared memory, as a lane has few
// neighbouring columns of a row.
#pragma once

#include "shared_tile.cuh"

namespace fastattention {

// Stores accumulators in shared memory as rows of kPitch bytes at `to`, starting at first_column. factor(step, which): the
// factor of one of a lane's two rows of a step.
template <class Arch, int kPitch, int kSteps, int kTiles, class Factor>
FA_DEVICE void leave_rows(const float (&acc)[kSteps][kTiles][Arch::kElements], uint32_t to, int first_column, Factor factor) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
        for (int which = 0; which < 2; ++which) {
            const float times = factor(step, which);
            const int row = step * Arch::kStepRows + Arch::row(which);
            constexpr int kOtherTile = Arch::kSplitsColumns, kOtherElement = !Arch::kSplitsColumns;
#pragma unroll
            for (int n = 0; n < kTiles; n += 1 + kOtherTile)
#pragma unroll
                for (int i = 0; i < Arch::kElements; i += 1 + kOtherElement)
                    if (Arch::row_of_element(i) == which)
                        store_shared_32(
                            to + row * kPitch + (first_column + Arch::value_column(n, i)) * 2,
                            Element::pack(acc[step][n][i] * times, acc[step][n + kOtherTile][i + kOtherElement] * times));
        }
}

// The destination of a warp's rows in memory. Only the first num_rows rows and num_columns columns exist.
struct RowsOut {
    uint16_t* base;
    int64_t stride_row;
    int num_rows, num_columns;
};

// Copies kColumns columns, starting at first_column, of kRows rows of kPitch bytes.
template <int kRows, int kColumns, int kPitch>
FA_DEVICE void copy_rows(const RowsOut& out, uint32_t from, int first_column) {
    constexpr int kChunks = kColumns / 8;
    for (int i = lane_index(); i < kRows * kChunks; i += 32) {
        const int row = i / kChunks, column = first_column + i % kChunks * 8;
        if (row >= out.num_rows || column >= out.num_columns) continue;
        store_global_128(out.base + row * out.stride_row + column, load_shared_128(from + row * kPitch + column * 2));
    }
}

}  // namespace fastattention
