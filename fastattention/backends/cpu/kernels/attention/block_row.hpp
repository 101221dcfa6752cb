// The keys that a row of blocks of a block mask keeps, as runs of adjacent keys. Without a block mask there is one run, so
// that prefill and backward have one code path.
#pragma once

#include <cstdint>

namespace fastattention {

// The tokens of a block are a multiple of this; fastattention/attention/problem.py checks it. Tiles that hide single pairs
// have as many queries and keys.
constexpr int64_t kBlockStep = 64;

// The keys that a block mask keeps for the queries of one row of blocks, and those that it hides from one of them.
struct BlockRow {
    const uint8_t* kept = nullptr;  // flag of block 0, the next one `stride` bytes on; null without a block mask
    int64_t stride = 0;
    int64_t block_n = 0;  // keys of a block
    const int32_t* tiles = nullptr;  // tile_index of the query and key 0, the next tile `tile_stride` on; null if none
    int64_t tile_stride = 0;
    const uint64_t* bits = nullptr;  // word of the query in the first tile of tile_bits

    FA_HOST_DEVICE bool keeps(int64_t key) const { return kept == nullptr || kept[key / block_n * stride] != 0; }

    // The keys that are hidden from the query, as bits, among the kBlockStep ones from `key` on, a multiple of kBlockStep.
    FA_HOST_DEVICE uint64_t hidden(int64_t key) const {
        const int32_t tile = tiles[key / kBlockStep * tile_stride];
        return tile < 0 ? 0 : ~bits[tile * kBlockStep];
    }

    // Whether a tile hides a key from the query.
    FA_HOST_DEVICE bool hides(int64_t key) const {
        return tiles != nullptr && (hidden(key / kBlockStep * kBlockStep) >> key % kBlockStep & 1) != 0;
    }

    // Calls visit(key) for the keys from `begin` to before `end` that tiles hide from the query.
    template <class Visit>
    FA_HOST_DEVICE void for_each_hidden(int64_t begin, int64_t end, Visit visit) const {
        for (int64_t first = begin / kBlockStep * kBlockStep; first < end; first += kBlockStep)
            for (uint64_t left = hidden(first); left != 0; left &= left - 1) {
                const int64_t key = first + __builtin_ctzll(left);
                if (key >= begin && key < end) visit(key);
            }
    }

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
