// Which tiles of columns the rows of a CTA go through, in order: all of a range, or those in blocks that a block mask keeps.
#pragma once

#include "block_grid.cuh"
#include "variant.cuh"

namespace fastattention {

// Tokens of a block are a multiple of it; fastattention/problem.py says the same.
constexpr int kBlockStep = 64;

// Those of a CTA, one sequence and one head of queries.
struct MaskedRows {
    int batch, head;
    bool are_keys;  // in a backward; otherwise rows are queries
    int first, last;
};

// Every `step` columns from `begin` to before `end`.
class EveryTile {
public:
    FA_DEVICE EveryTile(int begin, int end, int step) : begin_(begin), end_(end), step_(step) {}
    FA_DEVICE EveryTile(const AttentionParams&, const MaskedRows&, int begin, int end) : EveryTile(begin, end, kTileN) {}

    FA_DEVICE int begin() const { return begin_; }
    FA_DEVICE int end() const { return end_; }
    FA_DEVICE int next(int column) { return column + step_; }

private:
    const int begin_, end_, step_;
};

// Tiles of kTileN columns from `begin`, where one begins, to before `end`, in kept blocks. A lane looks at a block, so that a
// warp finds the next kept one of 32 in a word of bits. Where rows of the CTA lie in several rows of blocks, what any of these
// keeps counts.
class KeptTiles {
public:
    FA_DEVICE KeptTiles(const AttentionParams& p, const MaskedRows& rows, int begin, int end)
        : p_(p),
          rows_(rows),
          column_tokens_(rows.are_keys ? p.block_m : p.block_n),
          num_blocks_((end + column_tokens_ - 1) / column_tokens_),
          end_(end) {
        look_at(begin / column_tokens_);
        const int column = enter_next_block();
        begin_ = column < begin ? begin : column;
    }

    FA_DEVICE int begin() const { return begin_; }
    FA_DEVICE int end() const { return end_; }

    // The tile after the one at `column`, which was asked for last; `end` or more behind the last.
    FA_DEVICE int next(int column) {
        static_assert(!kBlockSparse || kBlockStep % kTileN == 0, "a tile is within a block");
        column += kTileN;
        return column < block_end_ ? column : enter_next_block();
    }

private:
    // Its first column.
    FA_DEVICE int enter_next_block() {
        while (word_ == 0 && looked_at_ < num_blocks_) look_at(looked_at_ + 32);
        const int column = (word_ == 0 ? num_blocks_ : looked_at_ + lowest_bit(word_)) * column_tokens_;
        word_ &= word_ - 1;
        block_end_ = column + column_tokens_;
        return column;
    }

    // 32 blocks, a bit each.
    FA_DEVICE void look_at(int first) {
        // Asked anew each time: registers less to keep.
        const BlockGrid grid = block_grid(p_, opaque(rows_.batch), opaque(rows_.head), rows_.are_keys);
        const int block = first + lane_index(),
                  num_rows = kMixesBlocks ? grid.row_of(rows_.last) - grid.row_of(rows_.first) + 1 : 1;
        bool kept = false;
        if (block < num_blocks_) {
            const uint8_t* at = grid.block(grid.row_of(opaque(rows_.first)), block);
            for (int row = 0; row < num_rows; ++row) kept = kept || at[row * grid.stride_row] != 0;
        }
        looked_at_ = first;
        word_ = lanes_where(kept);
    }

    const AttentionParams& p_;
    const MaskedRows rows_;
    const int column_tokens_, num_blocks_, end_;
    int begin_, block_end_;
    int looked_at_;  // the first of 32 blocks
    uint32_t word_;  // those that are kept and still to come
};

template <bool kSparse>
struct TileWalkOf {
    using Type = EveryTile;
};
template <>
struct TileWalkOf<true> {
    using Type = KeptTiles;
};
using TileWalk = TileWalkOf<kBlockSparse>::Type;

}  // namespace fastattention
