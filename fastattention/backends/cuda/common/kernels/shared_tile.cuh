// Tiles in shared memory, and copies of rows of global memory into them.
//
// Eight lanes that read 16 bytes each from the same column of eight neighbouring rows use all 32 banks once, whatever the
// headdim. Either rows are padded by 16 bytes, or (kSwizzled) the 16-byte chunks of a row are permuted, differently in
// neighbouring rows. Padding slows down asynchronous copies, which write whole rows at once. Tiles that are read more often
// than copied are better off with padding, as addresses are then plain sums.
#pragma once

#include "numbers.cuh"
#include "stored.cuh"

namespace fastattention {

template <int kBytesOfElement>
FA_DEVICE constexpr int pitch_of(int columns) {
    return columns * kBytesOfElement + (kSwizzled ? 0 : 16);
}

// The value to XOR the index of a chunk in this row with. It repeats every eight rows.
FA_DEVICE constexpr int swizzle_of(int pitch, int row) {
    if (!kSwizzled) return 0;
    const int chunks = pitch / 16, in_turn = chunks % 8 == 0 ? 8 : chunks % 4 == 0 ? 4 : chunks % 2 == 0 ? 2 : 1;
    return row / (8 / in_turn) % in_turn;
}

// Addresses of chunks in a lane's row, and in rows a multiple of eight further on. Of each pair of neighbouring chunks, the
// lane reads the first or the second.
template <int kPitch>
class LaneRow {
public:
    LaneRow() = default;
    FA_DEVICE LaneRow(uint32_t tile, int row, int second) {
        at_ = tile + row * kPitch;
        if constexpr (kSwizzled) {
            flip_ = (second ^ swizzle_of(kPitch, row)) * 16;
        } else {
            at_ += second * 16;
        }
    }

    // rows: a multiple of eight.
    FA_DEVICE uint32_t address(int rows, int pair) const {
        if constexpr (kSwizzled) return at_ + rows * kPitch + ((pair * 32) ^ flip_);
        return at_ + rows * kPitch + pair * 32;
    }

private:
    uint32_t at_, flip_;
};

// The place of a row: a block, and a row in it.
struct Place {
    int block, row;
};

// Rows of queries, keys, values or scales of one head of one sequence. kBlocked: in blocks of block_size rows, such as pages.
template <class Item, bool kBlocked>
struct SourceRows {
    const Item* base;  // row 0, or block 0
    int stride_row;    // below 2^31, so that addresses cost one multiplication
    int num_rows;          // tiles have zeros after them
    int num_columns;       // tiles have zeros after them
    const int32_t* table;  // indices of blocks, null when blocks are in order
    int64_t stride_block;
    Divisor block_size;
    int first;  // rows of the first block that come before row 0

    // The block of a row, and the row within it. The table ends with the sequence, so later rows are read from row 0.
    FA_DEVICE Place place_of(int index) const {
        if constexpr (!kBlocked) return {0, index};
        index = index < num_rows ? first + index : first;
        const int block = block_size.quotient_of(index);
        return {table == nullptr ? block : table[block], index - block * block_size.size};
    }

    FA_DEVICE const Item* at(const Place& place) const {
        const Item* row = base + static_cast<int64_t>(place.row) * stride_row;
        return kBlocked ? row + place.block * stride_block : row;
    }
};

// The places of the rows that a thread copies of a tile. A look-up in a table takes as long as a copy, so a decode looks up
// the next tile's rows when it begins to copy a tile.
template <class Source, int kCount, bool kLooksAhead>
class Places {
public:
    FA_DEVICE void look_up(const Source& from, int first_row, int step) {
        if constexpr (kLooksAhead) {
#pragma unroll
            for (int i = 0; i < kCount; ++i) ahead_[i] = from.place_of(first_row + i * step);
        }
    }

    // The place of the i-th row of the tile that was looked up last.
    FA_DEVICE Place place(const Source& from, int row, int i) const {
        if constexpr (kLooksAhead) return ahead_[i];
        return from.place_of(row);
    }

private:
    Place ahead_[kLooksAhead ? kCount : 1];
};

// Threads that copy a tile together and wait for each other.
struct WholeCta {
    static constexpr int kThreads = fastattention::kThreads;
    static FA_DEVICE int index() { return thread_index(); }
    static FA_DEVICE void barrier() { cta_barrier(); }
};

struct OneWarp {
    static constexpr int kThreads = 32;
    static FA_DEVICE int index() { return lane_index(); }
    static FA_DEVICE void barrier() { warp_barrier(); }
};

// Converts 16-bit elements from memory to operands of matrix products.
FA_DEVICE Words4 as_operands(Words4 chunk) {
    if constexpr (Element::kIsBfloat16 && !Operand::kIsBfloat16) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            chunk.word[i] = Operand::pack(Element::widen(static_cast<uint16_t>(chunk.word[i])),
                                          Element::widen(static_cast<uint16_t>(chunk.word[i] >> 16)));
    }
    return chunk;
}

// Converts eight of the sixteen bytes of a chunk of a quantized cache to operands.
FA_DEVICE Words4 widen_half(Words4 chunk, int half) {
    const uint32_t low = chunk.word[2 * half], high = chunk.word[2 * half + 1];
    return {widen_bytes<0, 1>(low), widen_bytes<2, 3>(low), widen_bytes<0, 1>(high), widen_bytes<2, 3>(high)};
}

// Writes a chunk of global memory to shared memory, as operands.
template <class Item>
FA_DEVICE void store_operands(uint32_t to, Words4 chunk) {
    if constexpr (sizeof(Item) == 1) {
        store_shared_128(to, widen_half(chunk, 0));
        store_shared_128(to + 16, widen_half(chunk, 1));
    } else {
        store_shared_128(to, as_operands(chunk));
    }
}

// Copies tiles of kRows x kColumns items, one after the other. Eight neighbouring lanes copy 128 bytes of a row; a thread
// copies the same columns of all of its rows. `begin` starts a copy, `finish` completes it for the thread itself; other
// threads see it after a barrier. Between the two, data is in flight (sm80) or waits in registers.
template <class Arch, class Team, class Item, bool kBlocked, int kRows, int kColumns, bool kLooksAhead = false>
class TileCopy {
public:
    using Source = SourceRows<Item, kBlocked>;
    // Asynchronous copies do not convert elements.
    static constexpr int kSharedBytes = Arch::kAsyncCopy ? sizeof(Item) : Arch::kSharedBytes;
    static constexpr int kPitch = pitch_of<kSharedBytes>(kColumns);
    static constexpr int kBytes = kRows * kPitch;

    FA_DEVICE explicit TileCopy(const Source& from) : from_(from) {
        from_.base = opaque(from.base + Team::index() % kLanesOfRow * kChunk);
    }

    // Looks up where the rows are of the tile that `begin` will be called for next.
    FA_DEVICE void look_up(int first_row) { places_.look_up(from_, first_row + Share().row(0), kRowStep); }

    FA_DEVICE void begin(int first_row, uint32_t to) {
        const Share share;
        if constexpr (!kSwizzled) to += share.offset();
#pragma unroll
        for (int i = 0; i < kRowsOfThread; ++i) {
            if (!share.has_row(i)) break;
            const int row = first_row + share.row(i);
            const bool row_valid = row < from_.num_rows;
            const Item* source = from_.at(places_.place(from_, row, i));
#pragma unroll
            for (int j = 0; j < kChunksOfThread; ++j) {
                if (!share.has_column(j)) break;
                const bool valid = row_valid && share.column(j) < from_.num_columns;
                if constexpr (Arch::kAsyncCopy) {
                    const uint32_t at = kSwizzled ? share.swizzled(i, j) : from_first(i, j);
                    copy_async_128(to + at, source + j * kChunkStep, valid);
                } else {
                    staged_[i][j] = valid ? load_global_128(source + j * kChunkStep) : Words4{};
                }
            }
        }
    }

    // Does both, row by row, as a thread's share of a tile may exceed its registers. Not for asynchronous copies.
    FA_DEVICE void copy(int first_row, uint32_t to) const {
        const Share share;
        to += share.offset();
#pragma unroll 1
        for (int i = 0; i < kRowsOfThread; ++i) {
            if (!share.has_row(i)) break;
            const int row = first_row + share.row(i);
            const Item* source = from_.at(from_.place_of(row));
            Words4 chunks[kChunksOfThread];
#pragma unroll
            for (int j = 0; j < kChunksOfThread; ++j) {
                const bool valid = row < from_.num_rows && share.has_column(j) && share.column(j) < from_.num_columns;
                chunks[j] = valid ? load_global_128(source + j * kChunkStep) : Words4{};
            }
#pragma unroll
            for (int j = 0; j < kChunksOfThread; ++j)
                if (share.has_column(j)) Arch::template store_chunk<Item>(to + from_first(i, j), chunks[j]);
        }
    }

    // Writes what `begin` has read, unless copies are asynchronous.
    FA_DEVICE void finish(uint32_t to) const {
        if constexpr (!Arch::kAsyncCopy) {
            const Share share;
            to += share.offset();
#pragma unroll
            for (int i = 0; i < kRowsOfThread; ++i) {
                if (!share.has_row(i)) break;
#pragma unroll
                for (int j = 0; j < kChunksOfThread; ++j) {
                    if (!share.has_column(j)) break;
                    Arch::template store_chunk<Item>(to + from_first(i, j), staged_[i][j]);
                }
            }
        }
    }

private:
    static constexpr int kChunk = 16 / sizeof(Item);  // items that a lane copies at a time
    static constexpr int kChunksOfRow = kColumns / kChunk;
    static constexpr int kLanesOfRow = kChunksOfRow > 4 ? 8 : kChunksOfRow;
    static constexpr int kRowStep = Team::kThreads / kLanesOfRow;
    static constexpr int kChunkStep = kLanesOfRow * kChunk;  // columns
    static constexpr int kRowsOfThread = (kRows + kRowStep - 1) / kRowStep;
    static constexpr int kChunksOfThread = (kColumns + kChunkStep - 1) / kChunkStep;

    // The distance from a thread's first chunk in shared memory to another one.
    static FA_DEVICE constexpr int from_first(int i, int j) { return i * kRowStep * kPitch + j * kChunkStep * kSharedBytes; }

    // The rows and columns of a tile that this thread copies.
    class Share {
    public:
        FA_DEVICE Share() {
            const int thread = opaque(Team::index());
            row_ = thread / kLanesOfRow;
            column_ = thread % kLanesOfRow * kChunk;
        }
        FA_DEVICE int row(int i) const { return row_ + i * kRowStep; }
        FA_DEVICE int column(int j) const { return column_ + j * kChunkStep; }
        FA_DEVICE bool has_row(int i) const { return kRows % kRowStep == 0 || row(i) < kRows; }
        FA_DEVICE bool has_column(int j) const { return kColumns % kChunkStep == 0 || column(j) < kColumns; }
        // The offset of its first chunk in shared memory.
        FA_DEVICE uint32_t offset() const { return row_ * kPitch + column_ * kSharedBytes; }
        // The offset of any chunk if rows are swizzled.
        FA_DEVICE uint32_t swizzled(int i, int j) const {
            return row(i) * kPitch + (column(j) / kChunk ^ swizzle_of(kPitch, row(i))) * 16;
        }

    private:
        int row_, column_;
    };

    Source from_;  // its base is at the thread's first column
    Places<Source, kRowsOfThread, kLooksAhead> places_;
    Words4 staged_[Arch::kAsyncCopy ? 1 : kRowsOfThread][Arch::kAsyncCopy ? 1 : kChunksOfThread];
};

// Copies the scales of tiles of kRows keys, one after the other, one float per key.
template <class Arch, class Team, bool kBlocked, int kRows, bool kLooksAhead>
class ScaleCopy {
public:
    static constexpr int kBytes = kRows * 4;

    FA_DEVICE explicit ScaleCopy(const SourceRows<float, kBlocked>& from) : from_(from) {}

    FA_DEVICE void look_up(int first_row) { places_.look_up(from_, first_row + Team::index(), Team::kThreads); }

    FA_DEVICE void begin(int first_row, uint32_t to) {
#pragma unroll
        for (int i = 0; i < kOfThread; ++i) {
            const int row = Team::index() + i * Team::kThreads;
            if (row >= kRows) break;
            const bool valid = first_row + row < from_.num_rows;
            const float* source = from_.at(places_.place(from_, first_row + row, i));
            if constexpr (Arch::kAsyncCopy) {
                copy_async_32(to + row * 4, source, valid);
            } else {
                staged_[i] = valid ? *source : 0.0f;
            }
        }
    }

    FA_DEVICE void finish(uint32_t to) const {
        if constexpr (!Arch::kAsyncCopy) {
#pragma unroll
            for (int i = 0; i < kOfThread; ++i) {
                const int row = Team::index() + i * Team::kThreads;
                if (row < kRows) store_shared_32(to + row * 4, as_bits(staged_[i]));
            }
        }
    }

private:
    static constexpr int kOfThread = (kRows + Team::kThreads - 1) / Team::kThreads;

    SourceRows<float, kBlocked> from_;
    Places<SourceRows<float, kBlocked>, kOfThread, kLooksAhead> places_;
    float staged_[kOfThread];
};

}  // namespace fastattention
