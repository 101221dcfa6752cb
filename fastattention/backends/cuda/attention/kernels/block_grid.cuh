// A block mask as a kernel reads it, for the rows and columns of its tiles.
#pragma once

#include "intrinsics.cuh"
#include "params.h"

namespace fastattention {

// The block mask of one sequence and one query head. Rows are queries, or keys in a backward; columns are the other side.
struct BlockGrid {
    const uint8_t* kept;  // flag of the first block
    int64_t stride_row, stride_column;
    int row_tokens, column_tokens;  // size of a block

    FA_DEVICE int row_of(int token) const { return token / row_tokens; }
    FA_DEVICE const uint8_t* block(int row, int column) const { return kept + row * stride_row + column * stride_column; }
    FA_DEVICE bool keeps(int row_token, int column_token) const {
        return *block(row_of(row_token), column_token / column_tokens) != 0;
    }
};

FA_DEVICE BlockGrid block_grid(const AttentionParams& p, int batch, int head, bool rows_are_keys = false) {
    const uint8_t* kept = p.block_mask + batch * p.block_stride_batch + head * p.block_stride_head;
    if (rows_are_keys) return {kept, p.block_stride_key, p.block_stride_row, p.block_n, p.block_m};
    return {kept, p.block_stride_row, p.block_stride_key, p.block_m, p.block_n};
}

}  // namespace fastattention
