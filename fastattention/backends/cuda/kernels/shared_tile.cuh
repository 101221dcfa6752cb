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

    // When paged.
    FA_DEVICE const uint16_t* row(int index) const {
        const int page = index / page_block_size;
        return base + pages[page] * stride_page + (index - page * page_block_size) * stride_row;
    }
};

// Copies one tile of kRows x kColumns after the other. Eight neighbouring lanes take 128 bytes of a row; a thread has the
// same columns in all of its rows. `begin` starts a copy, `finish` completes it for the thread itself: the others see it after
// a barrier. Between the two, data is on its way (sm80) or waits in registers.
template <class Arch, int kRows, int kColumns>
class TileCopy {
public:
    static constexpr int kPitch = pitch_of<Arch::kSharedBytes>(kColumns);
    static constexpr int kBytes = kRows * kPitch;

    FA_DEVICE TileCopy(const SourceRows& from, int first_row)
        : from_(from), row_(first_row + thread_row()), source_(from.base + row_ * from.stride_row + column_of(0)) {}

    FA_DEVICE void begin(uint32_t to) {
        to += thread_row() * kPitch + column_of(0) * Arch::kSharedBytes;
#pragma unroll
        for (int i = 0; i < kRowsOfThread; ++i) {
            if (!has_row(i)) break;
            const int row = row_ + i * kRowStep;
            const bool row_valid = row < from_.num_rows;
            const uint16_t* source = source_ + i * kRowStep * from_.stride_row;
            if constexpr (kPaged) {
                if (row_valid && from_.pages != nullptr) source = from_.row(row) + column_of(0);
            }
#pragma unroll
            for (int j = 0; j < kChunksOfThread; ++j) {
                if (!has_chunk(j)) break;
                const bool valid = row_valid && column_of(j) < from_.num_columns;
                if constexpr (Arch::kAsyncCopy) {
                    copy_async_128(to + i * kRowStep * kPitch + j * kChunkStep * 2, source + j * kChunkStep, valid);
                } else {
                    staged_[i][j] = valid ? load_global_128(source + j * kChunkStep) : Words4{};
                }
            }
        }
        row_ += kRows;
        source_ += kRows * from_.stride_row;
    }

    // Where copies are not asynchronous: writes what `begin` read.
    FA_DEVICE void finish(uint32_t to) const {
        if constexpr (!Arch::kAsyncCopy) {
            to += thread_row() * kPitch + column_of(0) * Arch::kSharedBytes;
#pragma unroll
            for (int i = 0; i < kRowsOfThread; ++i) {
                if (!has_row(i)) break;
#pragma unroll
                for (int j = 0; j < kChunksOfThread; ++j) {
                    if (!has_chunk(j)) break;
                    Arch::store_chunk(to + i * kRowStep * kPitch + j * kChunkStep * Arch::kSharedBytes, staged_[i][j]);
                }
            }
        }
    }

private:
    static constexpr int kLanesOfRow = kColumns < 64 ? kColumns / 8 : 8;
    static constexpr int kRowStep = kThreads / kLanesOfRow;
    static constexpr int kChunkStep = kLanesOfRow * 8;  // columns
    static constexpr int kRowsOfThread = (kRows + kRowStep - 1) / kRowStep;
    static constexpr int kChunksOfThread = (kColumns + kChunkStep - 1) / kChunkStep;

    static FA_DEVICE int thread_row() { return thread_index() / kLanesOfRow; }
    static FA_DEVICE int column_of(int chunk) { return thread_index() % kLanesOfRow * 8 + chunk * kChunkStep; }
    static FA_DEVICE bool has_row(int i) { return kRows % kRowStep == 0 || thread_row() + i * kRowStep < kRows; }
    static FA_DEVICE bool has_chunk(int j) { return kColumns % kChunkStep == 0 || column_of(j) < kColumns; }

    const SourceRows& from_;
    int row_;                 // the thread's first row of the next tile
    const uint16_t* source_;  // where it begins, when not paged
    Words4 staged_[Arch::kAsyncCopy ? 1 : kRowsOfThread][Arch::kAsyncCopy ? 1 : kChunksOfThread];
};

}  // namespace fastattention
