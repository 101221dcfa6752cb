// From a warp's accumulators to rows of 16-bit numbers in memory, through shared memory: a lane has few neighbours of a row.
#pragma once

#include "shared_tile.cuh"

namespace fastattention {

// Leaves accumulators as rows of kPitch bytes from `to` on, from first_column on. factor: of a row, given its step and which
// of a lane's two rows of it it is.
template <class Arch, int kPitch, int kSteps, int kTiles, class Factor>
FA_DEVICE void leave_rows(const float (&acc)[kSteps][kTiles][Arch::kElements], uint32_t to, int first_column, Factor factor) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
        for (int which = 0; which < 2; ++which) {
            const float times = factor(step, which);
            const int row = step * Arch::kStepRows + Arch::row(which);
#pragma unroll
            for (int n = 0; n < kTiles; ++n)
#pragma unroll
                for (int i = 0; i < Arch::kElements; i += 2)
                    if (Arch::row_of_element(i) == which)
                        store_shared_32(to + row * kPitch + (first_column + Arch::value_column(n, i)) * 2,
                                        Element::pack(acc[step][n][i] * times, acc[step][n][i + 1] * times));
        }
}

// Of rows in memory, the first num_rows and num_columns of a warp's share.
struct RowsOut {
    uint16_t* base;
    int64_t stride_row;
    int num_rows, num_columns;
};

// Copies the kColumns columns from first_column on of kRows rows of kPitch bytes.
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
