// Tiles in shared memory, and how rows of global memory get there.
//
// Rows are 16 bytes longer than their elements. Eight lanes that read 16 bytes each from the same column of eight
// neighbouring rows then use all 32 banks once, whatever the headdim.
#pragma once

#include "variant.cuh"

namespace fastattention {

template <int kBytesOfElement>
FA_DEVICE constexpr int pitch_of(int columns) {
    return columns * kBytesOfElement + 16;
}

// Rows of keys or values of one head of one sequence.
struct SourceRows {
    const uint16_t* base;          // row 0, or page 0
    int64_t stride_row;
    const int32_t* pages;          // of this sequence, when paged
    int64_t stride_page;
    int page_block_size;
    int num_rows;                  // beyond them tiles hold zeros
    int num_columns;               // likewise

    FA_DEVICE const uint16_t* row(int index) const {
        if constexpr (kPaged) {
            if (pages != nullptr) {
                const int page = index / page_block_size;
                return base + pages[page] * stride_page + (index - page * page_block_size) * stride_row;
            }
        }
        return base + index * stride_row;
    }
};

// Copies kRows x kColumns tiles. Eight neighbouring lanes take 128 bytes of a row; a thread has the same column in all of
// its rows. `begin` starts a copy, `finish` makes it visible to the thread's own writes in shared memory: the others see it
// after a barrier. Between the two, data is on its way (sm80) or waits in registers.
template <class Arch, int kRows, int kColumns>
class TileCopy {
public:
    static constexpr int kPitch = pitch_of<Arch::kSharedBytes>(kColumns);
    static constexpr int kBytes = kRows * kPitch;

    FA_DEVICE void begin(const SourceRows& from, int first_row, uint32_t to) {
        const int row = thread_index() / kLanesOfRow;
#pragma unroll
        for (int i = 0; i < kRowsOfThread; ++i) {
            const int r = row + i * kRowStep;
            if (kRows % kRowStep != 0 && r >= kRows) break;
            const bool row_valid = first_row + r < from.num_rows;
            const uint16_t* source = from.row(row_valid ? first_row + r : 0);
#pragma unroll
            for (int j = 0; j < kChunksOfThread; ++j) {
                const int column = column_of(j);
                if (kColumns % (kLanesOfRow * 8) != 0 && column >= kColumns) break;
                const bool valid = row_valid && column < from.num_columns;
                if constexpr (Arch::kAsyncCopy) {
                    copy_async_128(to + r * kPitch + column * 2, valid ? source + column : from.base, valid);
                } else {
                    staged_[i][j] = valid ? load_global_128(source + column) : Words4{};
                }
            }
        }
    }

    // Where copies are not asynchronous: writes what `begin` read.
    FA_DEVICE void finish(uint32_t to) const {
        if constexpr (!Arch::kAsyncCopy) {
            const int row = thread_index() / kLanesOfRow;
#pragma unroll
            for (int i = 0; i < kRowsOfThread; ++i) {
                const int r = row + i * kRowStep;
                if (kRows % kRowStep != 0 && r >= kRows) break;
#pragma unroll
                for (int j = 0; j < kChunksOfThread; ++j) {
                    const int column = column_of(j);
                    if (kColumns % (kLanesOfRow * 8) != 0 && column >= kColumns) break;
                    Arch::store_chunk(to + r * kPitch + column * Arch::kSharedBytes, staged_[i][j]);
                }
            }
        }
    }

private:
    static constexpr int kLanesOfRow = kColumns < 64 ? kColumns / 8 : 8;
    static constexpr int kRowStep = kThreads / kLanesOfRow;
    static constexpr int kRowsOfThread = (kRows + kRowStep - 1) / kRowStep;
    static constexpr int kChunksOfThread = (kColumns + kLanesOfRow * 8 - 1) / (kLanesOfRow * 8);

    static FA_DEVICE int column_of(int chunk) { return (thread_index() % kLanesOfRow + chunk * kLanesOfRow) * 8; }

    Words4 staged_[Arch::kAsyncCopy ? 1 : kRowsOfThread][Arch::kAsyncCopy ? 1 : kChunksOfThread];
};

}  // namespace fastattention
