// The slots of the keys that indices name. A CTA has a set of indices, and each of its warps a part of their keys.
//
// Warps count the keys of their parts that the query sees. Then each of them knows where its slots begin.
#pragma once

#include "intrinsics.cuh"
#include "numbers.cuh"
#include "selection_params.h"

namespace fastattention {

constexpr int kWarps = Config::num_warps, kThreads = 32 * kWarps;

template <bool kWide>
struct IndexOf {
    using Type = int32_t;
};
template <>
struct IndexOf<true> {
    using Type = int64_t;
};

class Selection {
public:
    FA_DEVICE Selection(const SelectionParams& p, int64_t set)
        : p_(p),
          indices_(static_cast<const Index*>(p.indices) + set * p.topk),
          slots_(p.slots + set * p.width),
          counts_(p.counts + set),
          head_offset_(set % p.heads * p.head_step) {
        find_sequence(static_cast<int>(set / p.heads));
        const int part = (p.width + kThreads - 1) / kThreads * 32;
        begin_ = warp_index() * part;
        end_ = begin_ + part < p.width ? begin_ + part : p.width;
    }

    FA_DEVICE void run() const {
        int count = 0;
        for (int first = begin_; first < end_; first += kStep) {
            int keys[kLoads];
            load(first, keys);
#pragma unroll
            for (int i = 0; i < kLoads; ++i) count += count_lanes(keys[i] >= 0);
        }
        if (lane_index() == 0) store_shared_32(shared_memory() + thread_index() / 32 * 4, static_cast<uint32_t>(count));
        cta_barrier();
        int before = 0, total = 0;
#pragma unroll
        for (int warp = 0; warp < kWarps; ++warp) {
            const int of_warp = static_cast<int>(load_shared_32(shared_memory() + warp * 4));
            before += warp < warp_index() ? of_warp : 0;
            total += of_warp;
        }
        for (int first = begin_; first < end_; first += kStep) write(first, before);
        // Kernels of attention load slots ahead, also behind the last.
        for (int i = total + thread_index(); i < p_.width; i += kThreads) slots_[i] = 0;
        if (thread_index() == 0) *counts_ = total;
    }

private:
    using Index = IndexOf<Config::wide_indices>::Type;
    static constexpr int kLoads = 8;  // of a thread, on their way together
    static constexpr int kStep = 32 * kLoads;

    // What the host has not checked must not lead behind a sequence's memory. Queries after the last sequence, as in CUDA
    // graphs of batches that vary, see no key.
    FA_DEVICE void find_sequence(int query) {
        int end = 0;
        if (p_.cu_seqlens_q == nullptr) {
            sequence_ = query / p_.seqlen_q;
            end = (sequence_ + 1) * p_.seqlen_q;
        } else {
            int low = 0, high = p_.batch_size;
            while (high - low > 1) {
                const int middle = (low + high) / 2;
                (p_.cu_seqlens_q[middle] <= query ? low : high) = middle;
            }
            sequence_ = low;
            end = p_.cu_seqlens_q[low + 1];
        }
        int length = p_.most_keys;
        if (p_.cu_seqlens_k != nullptr) length = p_.cu_seqlens_k[sequence_ + 1] - p_.cu_seqlens_k[sequence_];
        if (p_.seqused_k != nullptr && p_.seqused_k[sequence_] < length) length = p_.seqused_k[sequence_];
        const int later = end - 1 - query;
        seen_ = later < 0 ? 0 : p_.causal ? length - later : length;
    }

    // The keys of this lane from column `first` on, -1 where there is none that the query sees.
    FA_DEVICE void load(int first, int (&keys)[kLoads]) const {
        const Divisor blocks{p_.key_block, p_.key_block_multiplier, p_.key_block_shift};
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
            const int column = first + i * 32 + lane_index(), at = blocks.quotient_of(column);
            const Index block = column < end_ ? indices_[at] : Index{-1};
            // A product of what is no block might not fit an int.
            const bool may_be = block >= 0 && block < p_.most_keys;
            const int64_t key = may_be ? static_cast<int64_t>(block) * p_.key_block + (column - at * p_.key_block) : -1;
            keys[i] = key < seen_ ? static_cast<int>(key) : -1;
        }
    }

    // Writes the slots of the keys from column `first` on, and counts them. before: slots before them
    FA_DEVICE void write(int first, int& before) const {
        int keys[kLoads], slots[kLoads];
        load(first, keys);
#pragma unroll
        for (int i = 0; i < kLoads; ++i) slots[i] = keys[i] < 0 ? 0 : slot_of(keys[i]);
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
            const uint32_t seen = lanes_where(keys[i] >= 0);
            if (keys[i] >= 0) slots_[before + count_bits(seen & ((1u << lane_index()) - 1))] = slots[i];
            before += count_bits(seen);
        }
    }

    FA_DEVICE int slot_of(int key) const {
        int64_t token;
        if (p_.block_table != nullptr) {
            const int column = Divisor{p_.k_seqlen, p_.page_multiplier, p_.page_shift}.quotient_of(key);
            token = p_.block_table[sequence_ * p_.block_table_stride + column] * p_.row_step + (key - column * p_.k_seqlen);
        } else {
            token = (p_.cu_seqlens_k != nullptr ? p_.cu_seqlens_k[sequence_] : sequence_ * p_.row_step) + key;
        }
        return static_cast<int>(token * p_.token_step + head_offset_);
    }

    const SelectionParams& p_;
    const Index* const indices_;
    int32_t* const slots_;
    int32_t* const counts_;
    const int64_t head_offset_;
    int begin_, end_;  // columns of this warp
    int sequence_, seen_;
};

}  // namespace fastattention

extern "C" FA_KERNEL void FA_LAUNCH_BOUNDS(fastattention::kThreads, 1)
    fastattention_select_slots(FA_PARAMETER fastattention::SelectionParams params) {
    using namespace fastattention;
    Selection(params, cta_index()).run();
}
