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

// Rows of queries, keys or values of one head of one sequence.
struct SourceRows {
    const uint16_t* base;  // row 0, or page 0
    int stride_row;        // less than 2^31 elements: addresses cost one multiplication
    const int32_t* pages;  // of this sequence, null when not paged
    int64_t stride_page;
    int page_block_size;
    int num_rows;     // beyond them tiles hold zeros
    int num_columns;  // likewise

    FA_DEVICE const uint16_t* row(int index) const {
        if (kPaged && pages != nullptr) {
            const int page = index / page_block_size;
            return base + pages[page] * stride_page + static_cast<int64_t>(index - page * page_block_size) * stride_row;
        }
        return base + static_cast<int64_t>(index) * stride_row;
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

    FA_DEVICE explicit TileCopy(const SourceRows& from) : from_(from) {
        from_.base = computed_here(from.base + thread_index() % kLanesOfRow * 8);
    }

    FA_DEVICE void begin(int first_row, uint32_t to) {
        const Share share;
        to += share.offset();
#pragma unroll
        for (int i = 0; i < kRowsOfThread; ++i) {
            if (!share.has_row(i)) break;
            const int row = first_row + share.row(i);
            const bool row_valid = row < from_.num_rows;
            // A block table ends with the sequence.
            const uint16_t* source = from_.row(kPaged && !row_valid ? 0 : row);
#pragma unroll
            for (int j = 0; j < kChunksOfThread; ++j) {
                if (!share.has_column(j)) break;
                const bool valid = row_valid && share.column(j) < from_.num_columns;
                if constexpr (Arch::kAsyncCopy) {
                    copy_async_128(to + i * kRowStep * kPitch + j * kChunkStep * 2, source + j * kChunkStep, valid);
                } else {
                    staged_[i][j] = valid ? load_global_128(source + j * kChunkStep) : Words4{};
                }
            }
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

    // The rows and columns of a tile that this thread copies.
    class Share {
    public:
        FA_DEVICE Share() {
            const int thread = computed_here(thread_index());
            row_ = thread / kLanesOfRow;
            column_ = thread % kLanesOfRow * 8;
        }
        FA_DEVICE int row(int i) const { return row_ + i * kRowStep; }
        FA_DEVICE int column(int j) const { return column_ + j * kChunkStep; }
        FA_DEVICE bool has_row(int i) const { return kRows % kRowStep == 0 || row(i) < kRows; }
        FA_DEVICE bool has_column(int j) const { return kColumns % kChunkStep == 0 || column(j) < kColumns; }
        // Of its first chunk in shared memory.
        FA_DEVICE uint32_t offset() const { return row_ * kPitch + column_ * Arch::kSharedBytes; }

    private:
        int row_, column_;
    };

    SourceRows from_;  // from the thread's first column on
    Words4 staged_[Arch::kAsyncCopy ? 1 : kRowsOfThread][Arch::kAsyncCopy ? 1 : kChunksOfThread];
};

}  // namespace fastattention
