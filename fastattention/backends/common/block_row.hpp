// Which keys a row of blocks of a block mask keeps, and the tiles of keys that a kernel goes through: the same steps for dense,
// causal, windowed and block-sparse attention. Plain C++ without includes, for host and device compilers.
#pragma once

#ifndef FA_HOST_DEVICE
#define FA_HOST_DEVICE
#endif

namespace fastattention {

// The keys that a block mask leaves to the queries of one row of blocks.
struct BlockRow {
    const unsigned char* kept = nullptr;  // of block 0, then `stride` bytes on; null without a block mask: all are kept
    long long stride = 0;
    long long block_n = 0;  // keys of a block

    FA_HOST_DEVICE bool keeps(long long key) const { return kept == nullptr || kept[key / block_n * stride] != 0; }

    // The first key from `key` on that is kept; `end` when there is none before.
    FA_HOST_DEVICE long long next(long long key, long long end) const {
        while (key < end && !keeps(key)) key = (key / block_n + 1) * block_n;
        return key < end ? key : end;
    }

    // One past the last of the keys from `key` on that are kept without a gap; `end` at most.
    FA_HOST_DEVICE long long run_end(long long key, long long end) const {
        if (kept == nullptr) return end;
        while (key < end && keeps(key)) key = (key / block_n + 1) * block_n;
        return key < end ? key : end;
    }
};

// Runs of neighbouring keys: the kept ones from `begin` to `end`, in order, in pieces as long as whoever asks can take.
class KeyRuns {
public:
    FA_HOST_DEVICE KeyRuns(const BlockRow& row, long long begin, long long end)
        : row_(row), end_(end), first_(begin), past_last_(begin), run_end_(begin) {}

    // Moves to the first piece, then to the next, of at most `most` keys; false when there is none.
    FA_HOST_DEVICE bool next(long long most) {
        first_ = past_last_;
        if (first_ >= run_end_) {
            first_ = row_.next(first_, end_);
            if (first_ >= end_) return false;
            run_end_ = row_.run_end(first_, end_);
        }
        past_last_ = run_end_ - first_ < most ? run_end_ : first_ + most;
        return true;
    }

    FA_HOST_DEVICE long long first() const { return first_; }
    FA_HOST_DEVICE long long past_last() const { return past_last_; }
    FA_HOST_DEVICE long long count() const { return past_last_ - first_; }

private:
    const BlockRow& row_;
    const long long end_;
    long long first_, past_last_, run_end_;
};

}  // namespace fastattention
