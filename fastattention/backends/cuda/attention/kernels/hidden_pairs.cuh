// Hides single pairs of a query and a key, which tiles of 64 x 64 bits of a block mask say.
#pragma once

#include "block_grid.cuh"

namespace fastattention {

// Sets scores of a warp's rows to `hidden` where the query does not see the key. The rows from first_row on, and the columns
// from first_column on, lie within one tile of tile_index.
template <class Arch, bool kRowsAreKeys, int kSteps, int kTiles>
FA_DEVICE void hide_pairs(float (&scores)[kSteps][kTiles][Arch::kElements], const AttentionParams& p, int batch, int head,
                          int first_row, int first_column, float hidden) {
    const int first_query = kRowsAreKeys ? first_column : first_row, first_key = kRowsAreKeys ? first_row : first_column;
    const int64_t* words = tile_words(p, batch, head, first_query, first_key);
    if (words == nullptr) return;
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
        for (int which = 0; which < 2; ++which) {
            const int row = step * Arch::kStepRows + Arch::row(which);
            const int64_t of_row = kRowsAreKeys ? 0 : words[row];
#pragma unroll
            for (int n = 0; n < kTiles; ++n)
#pragma unroll
                for (int i = 0; i < Arch::kElements; ++i) {
                    if (Arch::row_of_element(i) != which) continue;
                    const int column = Arch::score_column(n, i);
                    const int64_t word = kRowsAreKeys ? words[column] : of_row;
                    const int bit = first_key % kTileTokens + (kRowsAreKeys ? row : column);
                    if ((word >> bit & 1) == 0) scores[step][n][i] = hidden;
                }
        }
}

}  // namespace fastattention
