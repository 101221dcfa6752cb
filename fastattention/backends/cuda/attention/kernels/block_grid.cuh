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

constexpr int kTileTokens = 64;  // queries, and keys, of a tile of tile_index

// The words of the tile that hides pairs of a query and a key, from that of the query on; null where no tile does.
FA_DEVICE const int64_t* tile_words(const AttentionParams& p, int batch, int head, int query, int key) {
    const int tile = p.tile_index[batch * p.tile_stride_batch + head * p.tile_stride_head +
                                  query / kTileTokens * p.tile_stride_row + key / kTileTokens * p.tile_stride_key];
    return tile < 0 ? nullptr : p.tile_bits + static_cast<int64_t>(tile) * kTileTokens + query % kTileTokens;
}

// Whether a tile hides a key from a query.
FA_DEVICE bool hides_pair(const AttentionParams& p, int batch, int head, int query, int key) {
    const int64_t* word = tile_words(p, batch, head, query, key);
    return word != nullptr && (*word >> key % kTileTokens & 1) == 0;
}

}  // namespace fastattention
