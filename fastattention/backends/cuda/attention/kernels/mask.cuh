// Applies the mask to the scores of a warp's rows.
#pragma once

#include "work.cuh"

namespace fastattention {

// Sets scores outside the mask, or past the last column, to `hidden`. token_of_row(step, which): the token of one of this
// lane's rows; first_column: the column of the first score in the mask.
template <class Arch, bool kHasLeft, int kSteps, int kTiles, class TokenOfRow>
FA_DEVICE void hide_scores(float (&scores)[kSteps][kTiles][Arch::kElements], const BasicTileRange<int>& mask,
                           int first_column, float hidden, TokenOfRow token_of_row) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
        for (int which = 0; which < 2; ++which) {
            const int row = token_of_row(step, which);
            const int begin = kHasLeft ? mask.row_begin(row) - first_column : 0;
            const int end = mask.row_end(row) - first_column;
#pragma unroll
            for (int n = 0; n < kTiles; ++n)
#pragma unroll
                for (int i = 0; i < Arch::kElements; ++i)
                    if (Arch::row_of_element(i) == which) {
                        const int column = Arch::score_column(n, i);
                        if ((kHasLeft && column < begin) || column >= end) scores[step][n][i] = hidden;
                    }
        }
}

template <class Arch, int kSteps, int kTiles, class TokenOfRow>
FA_DEVICE void apply_mask(float (&scores)[kSteps][kTiles][Arch::kElements], const BasicTileRange<int>& mask, int first_column,
                          float hidden, TokenOfRow token_of_row) {
    if (mask.left < 0) {
        hide_scores<Arch, false>(scores, mask, first_column, hidden, token_of_row);
    } else {
        hide_scores<Arch, true>(scores, mask, first_column, hidden, token_of_row);
    }
}

}  // namespace fastattention
