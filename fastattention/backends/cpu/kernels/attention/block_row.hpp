// The keys that a row of blocks of a block mask keeps, as runs of adjacent keys. Without a block mask there is one run, so
// that prefill and backward have one code path.
#pragma once

#include <cstdint>

namespace fastattention {

// The tokens of a block are a multiple of this; fastattention/attention/problem.py checks it.
constexpr int64_t kBlockStep = 64;

// The keys that a block mask keeps for the queries of one row of blocks.
struct BlockRow {
    const uint8_t* kept = nullptr;  // flag of block 0, the next one `stride` bytes on; null without a block mask
    int64_t stride = 0;
    int64_t block_n = 0;  // keys of a block

    FA_HOST_DEVICE bool keeps(int64_t key) const { return kept == nullptr || kept[key / block_n * stride] != 0; }

    // The first kept key from `key` on; `end` if there is none before it.
    FA_HOST_DEVICE int64_t next(int64_t key, int64_t end) const {
        while (key < end && !keeps(key)) key = (key / block_n + 1) * block_n;
        return key < end ? key : end;
    }

    // The end of the run of kept keys that begins at `key`; `end` at most.
    FA_HOST_DEVICE int64_t run_end(int64_t key, int64_t end) const {
        if (kept == nullptr) return end;
        while (key < end && keeps(key)) key = (key / block_n + 1) * block_n;
        return key < end ? key : end;
    }
};

// Iterates over the kept keys from `begin` to `end` in runs of adjacent keys, each as long as the caller can process.
class KeyRuns {
public:
    FA_HOST_DEVICE KeyRuns(const BlockRow& row, int64_t begin, int64_t end)
        : row_(row), end_(end), first_(begin), past_last_(begin), run_end_(begin) {}

    // Moves to the first run, then to the next, of at most `most` keys; false if there is none.
    FA_HOST_DEVICE bool next(int64_t most) {
        first_ = past_last_;
        if (first_ >= run_end_) {
            first_ = row_.next(first_, end_);
            if (first_ >= end_) return false;
            run_end_ = row_.run_end(first_, end_);
        }
        past_last_ = run_end_ - first_ < most ? run_end_ : first_ + most;
        return true;
    }

    FA_HOST_DEVICE int64_t first() const { return first_; }
    FA_HOST_DEVICE int64_t past_last() const { return past_last_; }
    FA_HOST_DEVICE int64_t count() const { return past_last_ - first_; }

private:
    const BlockRow& row_;
    const int64_t end_;
    int64_t first_, past_last_, run_end_;
};

}  // namespace fastattention
