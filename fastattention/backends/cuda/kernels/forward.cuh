// Attention forward of one tile of query rows: the keys go by tile by tile through shared memory, and every warp works on rows
// of its own (warp_rows.cuh).
#pragma once

#include "warp_rows.cuh"

namespace fastattention {

// Whether all rows see all keys of a tile, where that is known when compiling.
template <bool kValue>
struct AllSeen {
    static constexpr bool value = kValue;
};

// Modified scores are much code already, and it would have to fit the instruction cache twice.
constexpr bool kSeparateFullTiles = Arch::kSeparateFullTiles && !kModifiesScores;

using QueryCopy = TileCopy<Arch, kTileM, kHeaddim>;
using KeyCopy = TileCopy<Arch, kTileN, kHeaddim>;
using ValueCopy = TileCopy<Arch, kTileN, kHeaddimV>;

constexpr int kQueryBytes = QueryCopy::kBytes > kTileM * kOutPitch ? QueryCopy::kBytes : kTileM * kOutPitch;
constexpr int kSharedMemory = kQueryBytes + kStages * (KeyCopy::kBytes + ValueCopy::kBytes);
static_assert(kSharedMemory == FA_SHARED_BYTES, "heuristics.py computes the same");

class ForwardTile {
public:
    FA_DEVICE ForwardTile(const ForwardParams& p, const Work& work, const BasicTileRange<int>& mask)
        : first_row_(work.m_tile * kTileM),
          last_row_(smaller(first_row_ + kTileM, mask.seqlen_q) - 1),
          key_begin_(mask.row_begin(first_row_) / kTileN * kTileN),
          key_end_(mask.row_end(last_row_)),
          full_begin_(mask.row_begin(last_row_)),
          full_end_(first_row_ + kTileM - kWarpRows <= last_row_ ? mask.row_end(first_row_) : 0),
          q_rows_(query_rows(p, work, mask.seqlen_q)),
          k_rows_(cache_rows(p, work, key_end_, p.k, p.k_stride_batch, p.k_stride_row, p.k_stride_head, p.headdim)),
          v_rows_(cache_rows(p, work, key_end_, p.v + work.first_column, p.v_stride_batch, p.v_stride_row,
                             p.v_stride_head, p.headdim_v - work.first_column)),
          q_shared_(shared_memory()),
          k_shared_(q_shared_ + kQueryBytes),
          v_shared_(k_shared_ + kStages * KeyCopy::kBytes),
          rows_(p, work, mask, last_row_) {}

    FA_DEVICE void run() {
        if (key_begin_ < key_end_) {
            if constexpr (Arch::kAsyncCopy && kStages == 2) {
                run_double_buffered();
            } else {
                run_single_buffered();
            }
        }
        rows_.finish(q_shared_);
    }

private:
    // Calls `step` for one tile of keys after the other, and says when compiling whether all rows of the CTA see all of its
    // keys. The code for those that do is without a word about the mask, which lets the compiler place it more freely.
    template <class Step>
    FA_DEVICE void for_each_tile(Step step) const {
        for (int key = key_begin_; key < key_end_; key += kTileN) {
            if (kSeparateFullTiles && key >= full_begin_ && key + kTileN <= full_end_) {
                step(AllSeen<true>{}, key);
            } else {
                step(AllSeen<false>{}, key);
            }
        }
    }

    // Two tiles of keys and values in shared memory: while one is worked on, the next is on its way. One barrier a tile
    // says both that this tile has arrived and that nobody reads the one before it any more.
    FA_DEVICE void run_double_buffered() {
        QueryCopy q_copy(q_rows_);
        KeyCopy k_copy(k_rows_);
        ValueCopy v_copy(v_rows_);
        q_copy.begin(first_row_, q_shared_);
        k_copy.begin(key_begin_, k_shared_);
        v_copy.begin(key_begin_, v_shared_);
        copy_async_commit();
        copy_async_wait<0>();
        block_barrier();
        rows_.load_queries(q_shared_);
        int stage = 0;
        for (int key = key_begin_; key < key_end_; key += kTileN) {
            if (key + kTileN < key_end_) {
                k_copy.begin(key + kTileN, k_shared_ + (stage ^ 1) * KeyCopy::kBytes);
                v_copy.begin(key + kTileN, v_shared_ + (stage ^ 1) * ValueCopy::kBytes);
            }
            copy_async_commit();
            const TileKind kind = rows_.kind_of(key);
            if (kind != TileKind::kSkipped) {
                WarpRows::Scores scores = {};
                rows_.multiply_queries(scores, k_shared_ + stage * KeyCopy::kBytes);
                rows_.prepare(scores, key, kind);
                rows_.accumulate_values(scores, v_shared_ + stage * ValueCopy::kBytes);
            }
            stage ^= 1;
            copy_async_wait<0>();
            block_barrier();
        }
    }

    // One tile of keys and one of values: the values arrive while keys are worked on, and the other way round. No barrier
    // parts the softmax from the product with the values, so that the exponentials of some keys overlap the products of others.
    FA_DEVICE void run_single_buffered() {
        QueryCopy q_copy(q_rows_);
        KeyCopy k_copy(k_rows_);
        ValueCopy v_copy(v_rows_);
        q_copy.begin(first_row_, q_shared_);
        k_copy.begin(key_begin_, k_shared_);
        q_copy.finish(q_shared_);
        arrive(k_copy, k_shared_);
        rows_.load_queries(q_shared_);
        for_each_tile([&](auto all_seen, int key) {
            v_copy.begin(key, v_shared_);
            const bool more = key + kTileN < key_end_;
            const TileKind kind = all_seen.value ? TileKind::kFull : rows_.kind_of(key);
            WarpRows::Scores scores = {};
            if (kind != TileKind::kSkipped) rows_.multiply_queries(scores, k_shared_);
            arrive(v_copy, v_shared_);
            if (more) k_copy.begin(key + kTileN, k_shared_);
            if (kind != TileKind::kSkipped) {
                rows_.prepare(scores, key, kind);
                rows_.accumulate_values(scores, v_shared_);
            }
            // After the last tile too, for nothing: a branch here would part the code that the compiler interleaves.
            arrive(k_copy, k_shared_);
        });
    }

    // Everyone is done with what lay in the place of this copy before: each waited at a barrier since.
    template <class Copy>
    FA_DEVICE void arrive(const Copy& copy, uint32_t to) {
        copy.finish(to);
        if constexpr (Arch::kAsyncCopy) {
            copy_async_commit();
            copy_async_wait<0>();
        }
        block_barrier();
    }

    const int first_row_, last_row_;
    const int key_begin_, key_end_;    // keys that some row of the CTA sees
    const int full_begin_, full_end_;  // keys that all of them see; none when a warp has no rows and may rest
    const SourceRows q_rows_, k_rows_, v_rows_;
    const uint32_t q_shared_, k_shared_, v_shared_;
    WarpRows rows_;
};

}  // namespace fastattention

extern "C" FA_KERNEL void FA_LAUNCH_BOUNDS(fastattention::kThreads, FA_MIN_BLOCKS)
    fastattention_forward(FA_PARAMETER fastattention::ForwardParams params) {
    using namespace fastattention;
    const Work work = find_work(params);
    const BasicTileRange<int> mask = mask_of(params, work.batch);
    if (work.m_tile * kTileM >= mask.seqlen_q) return;
    ForwardTile(params, work, mask).run();
}
