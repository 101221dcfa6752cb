// Reads a tile transposed, for architectures without an instruction that does.
#pragma once

#include "../shared_tile.cuh"

namespace fastattention {

// x = tile^T for a tile of 16-bit elements in rows of kPitch bytes.
template <class Layout, int kPitch, int kSteps, int kTiles>
FA_DEVICE void read_numbers_transposed(float (&x)[kSteps][kTiles][Layout::kElements], uint32_t tile) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
        for (int n = 0; n < kTiles; ++n)
#pragma unroll
            for (int i = 0; i < Layout::kElements; ++i) {
                const int column = step * Layout::kStepRows + Layout::row(Layout::row_of_element(i));
                const uint32_t pair = load_shared_32(tile + Layout::score_column(n, i) * kPitch + column / 2 * 4);
                x[step][n][i] = Operand::widen(static_cast<uint16_t>(pair >> column % 2 * 16));
            }
}

}  // namespace fastattention
