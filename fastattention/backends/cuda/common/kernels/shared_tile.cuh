// Tiles in shared memory, and how rows of global memory get there.
//
// Eight lanes that read 16 bytes each from the same column of eight neighbouring rows use all 32 banks once, whatever the
// headdim. Either rows are 16 bytes longer than their elements, or (kSwizzled) the chunks of 16 bytes change places within
// a row, differently in neighbouring rows. Asynchronous copies write whole rows at once, which a longer row would slow
// down; what is read more often than it is copied is better off with addresses that are plain sums.
#pragma once

#include "numbers.cuh"
#include "stored.cuh"

namespace fastattention {

template <int kBytesOfElement>
FA_DEVICE constexpr int pitch_of(int columns) {
    return columns * kBytesOfElement + Config::row_padding;
}

// What the number of a chunk in this row is combined with by exclusive or. The same every eight rows.
FA_DEVICE constexpr int swizzle_of(int pitch, int row) {
    if (!kSwizzled) return 0;
    const int chunks = pitch / 16, in_turn = chunks % 8 == 0 ? 8 : chunks % 4 == 0 ? 4 : chunks % 2 == 0 ? 2 : 1;
    return row / (8 / in_turn) % in_turn;
}

// Pairs of neighbouring chunks of a lane's row, and of those eight rows further on and so on: the lane takes the first or
// the second of each pair.
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

// Of a row: a block, and a row in it.
struct Place {
    int block, row;
};

// Rows of queries, keys or values, or of scales, of one head of one sequence; kBlocked: in blocks of block_size rows, such
// as pages.
template <class Item, bool kBlocked>
struct SourceRows {
    const Item* base;  // row 0, or block 0
    int stride_row;    // less than 2^31 items: addresses cost one multiplication
    int num_rows;          // beyond them tiles hold zeros
    int num_columns;       // likewise
    // Of blocks:
    const int32_t* table;  // where they lie, null when they lie in order
    int64_t stride_block;
    Divisor block_size;
    int first;  // rows of the first block that come before row 0

    // The block that a row is in, and its place there. A table ends with the sequence: rows beyond are as row 0.
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

// Where the rows lie that a thread copies of a tile. To find out takes as long as a copy where a table must be asked, so a
// decode asks for the next tile's when it begins the copy of one.
template <class Source, int kCount, bool kLooksAhead>
class Places {
public:
    FA_DEVICE void look_up(const Source& from, int first_row, int step) {
        if constexpr (kLooksAhead) {
#pragma unroll
            for (int i = 0; i < kCount; ++i) ahead_[i] = from.place_of(first_row + i * step);
        }
    }

    // Of the i-th row, of the tile that was asked for last.
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

// What lies in memory, 16 bits a number, as matrix products take it.
FA_DEVICE Words4 as_operands(Words4 chunk) {
    if constexpr (Element::kIsBfloat16 && !Operand::kIsBfloat16) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            chunk.word[i] = Operand::pack(Element::widen(static_cast<uint16_t>(chunk.word[i])),
                                          Element::widen(static_cast<uint16_t>(chunk.word[i] >> 16)));
    }
    return chunk;
}

// Eight of the sixteen bytes of a chunk of a quantized cache as operands.
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

// Copies one tile of kRows x kColumns items after the other. Eight neighbouring lanes take 128 bytes of a row; a thread has
// the same columns in all of its rows. `begin` starts a copy, `finish` completes it for the thread itself: the others see
// it after a barrier. Between the two, data is on its way (sm80) or waits in registers.
template <class Arch, class Team, class Item, bool kBlocked, int kRows, int kColumns, bool kLooksAhead = false>
class TileCopy {
public:
    using Source = SourceRows<Item, kBlocked>;
    // Asynchronous copies change nothing on the way.
    static constexpr int kSharedBytes = Arch::kAsyncCopy ? sizeof(Item) : Arch::kSharedBytes;
    static constexpr int kPitch = pitch_of<kSharedBytes>(kColumns);
    static constexpr int kBytes = kRows * kPitch;

    FA_DEVICE explicit TileCopy(const Source& from) : from_(from) {
        from_.base = opaque(from.base + Team::index() % kLanesOfRow * kChunk);
    }

    // Asks where the rows of a tile lie, of which `begin` is to be called next.
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

    // Both, row by row: what a thread copies of a tile may be more than its registers hold. Where copies are not
    // asynchronous.
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

    // Where copies are not asynchronous: writes what `begin` read.
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
    static constexpr int kChunk = 16 / sizeof(Item);  // items that a lane takes at a time
    static constexpr int kChunksOfRow = kColumns / kChunk;
    static constexpr int kLanesOfRow = kChunksOfRow > 4 ? 8 : kChunksOfRow;
    static constexpr int kRowStep = Team::kThreads / kLanesOfRow;
    static constexpr int kChunkStep = kLanesOfRow * kChunk;  // columns
    static constexpr int kRowsOfThread = (kRows + kRowStep - 1) / kRowStep;
    static constexpr int kChunksOfThread = (kColumns + kChunkStep - 1) / kChunkStep;

    // From a thread's first chunk in shared memory to another.
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
        // Of its first chunk in shared memory.
        FA_DEVICE uint32_t offset() const { return row_ * kPitch + column_ * kSharedBytes; }
        // Of any chunk, where they change places.
        FA_DEVICE uint32_t swizzled(int i, int j) const {
            return row(i) * kPitch + (column(j) / kChunk ^ swizzle_of(kPitch, row(i))) * 16;
        }

    private:
        int row_, column_;
    };

    Source from_;  // from the thread's first column on
    Places<Source, kRowsOfThread, kLooksAhead> places_;
    Words4 staged_[Arch::kAsyncCopy ? 1 : kRowsOfThread][Arch::kAsyncCopy ? 1 : kChunksOfThread];
};

// Copies the scales of one tile of kRows keys after the other, a float a key.
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
