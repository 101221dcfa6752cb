// The tiles of columns that the rows of a CTA visit, in order: all of a range, or those in blocks that a block mask keeps.
#pragma once

#include "block_grid.cuh"
#include "work.cuh"

namespace fastattention {

constexpr int kBlockStep = Config::block_step;  // tokens of a block are a multiple of it
static_assert(!kMixesBlocks || kBlockStep % kWarpRows == 0, "a warp skips what its rows do not keep");

// The rows of a CTA, of one sequence and one query head.
struct MaskedRows {
    int batch, head;
    bool are_keys;  // only in a backward; otherwise rows are queries
    int first, last;
};

// A tile every `step` columns, from `begin` to before `end`.
class EveryTile {
public:
    static constexpr int kSharedBytes = 0;

    FA_DEVICE EveryTile(int begin, int end, int step) : begin_(begin), end_(end), step_(step) {}
    FA_DEVICE EveryTile(const AttentionParams&, const MaskedRows&, int begin, int end, uint32_t)
        : EveryTile(begin, end, kTileN) {}

    FA_DEVICE int begin() const { return begin_; }
    FA_DEVICE int end() const { return end_; }
    FA_DEVICE int next(int column) { return column + step_; }

private:
    const int begin_, end_, step_;
};

// Tiles of kTileN columns in kept blocks, from `begin`, a multiple of kTileN, to before `end`. Where rows of the CTA lie in
// several rows of blocks, a block counts as kept if any of these keeps it. kThreads threads look at one block each, and list
// the kept ones in shared memory; at_ is the position in the list.
class KeptTiles {
public:
    // Memory for the number of blocks that each warp keeps, the blocks' first columns, and an entry that says how to go on.
    static constexpr int kSharedBytes = (kWarps + kThreads + 1 + 3) / 4 * 16;

    // No thread reads the previous contents of `shared` any more.
    FA_DEVICE KeptTiles(const AttentionParams& p, const MaskedRows& rows, int begin, int end, uint32_t shared)
        : p_(p), rows_(rows), list_(shared + kWarps * 4), at_(list_), end_(end) {
        list_blocks(begin / column_tokens());
        const int column = column_at_list();
        begin_ = column < begin ? begin : column;
    }

    FA_DEVICE int begin() const { return begin_; }
    FA_DEVICE int end() const { return end_; }

    // The tile after `column`, the result of the previous call, which is before `end`. Returns `end` or more after the last
    // tile. All threads call this together.
    FA_DEVICE int next(int column) {
        static_assert(!kBlockSparse || kBlockStep % kTileN == 0, "a tile is within a block");
        column += kTileN;
        if (column < static_cast<int>(load_shared_32(at_)) + column_tokens()) return column;
        at_ += 4;
        return column_at_list();
    }

private:
    // The first column of the block at at_. An entry ~column says that blocks from `column` on are not listed yet.
    FA_DEVICE int column_at_list() {
        int column = load_shared_32(at_);
        while (column < 0) {
            cta_barrier();  // all threads have read the entry
            list_blocks(~column / column_tokens());
            at_ = list_;
            column = load_shared_32(at_);
        }
        return column;
    }

    // Lists the kept blocks among kThreads blocks, starting at `first`.
    FA_DEVICE void list_blocks(int first) {
        // Computed anew each time, which saves registers.
        const BlockGrid grid = block_grid(p_, opaque(rows_.batch), opaque(rows_.head), rows_.are_keys);
        const int block = first + thread_index(), num_blocks = (end_ + column_tokens() - 1) / column_tokens(),
                  num_rows = kMixesBlocks ? grid.row_of(rows_.last) - grid.row_of(rows_.first) + 1 : 1;
        bool kept = false;
        if (block < num_blocks) {
            const uint8_t* at = grid.block(grid.row_of(opaque(rows_.first)), block);
            for (int row = 0; row < num_rows; ++row) kept = kept || at[row * grid.stride_row] != 0;
        }
        const uint32_t word = lanes_where(kept), counts = list_ - kWarps * 4;
        const int this_warp = warp_index();
        if (lane_index() == 0) store_shared_32(counts + this_warp * 4, count_bits(word));
        cta_barrier();
        int before = count_bits(word & ((1u << lane_index()) - 1)), all = 0;
#pragma unroll
        for (int warp = 0; warp < kWarps; ++warp) {
            const int count = load_shared_32(counts + warp * 4);
            if (warp < this_warp) before += count;
            all += count;
        }
        if (kept) store_shared_32(list_ + before * 4, block * column_tokens());
        const int behind = first + kThreads;
        if (thread_index() == 0) {
            const bool goes_on = behind < num_blocks;
            store_shared_32(list_ + all * 4, goes_on ? ~(behind * column_tokens()) : num_blocks * column_tokens());
        }
        cta_barrier();
    }

    FA_DEVICE int column_tokens() const { return rows_.are_keys ? p_.block_m : p_.block_n; }

    const AttentionParams& p_;
    const MaskedRows rows_;
    const uint32_t list_;
    uint32_t at_;  // list entry of the current block
    const int end_;
    int begin_;
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
