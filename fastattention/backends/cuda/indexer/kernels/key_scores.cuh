// Scores of an indexer: for each query and key, the weighted sum over heads of the positive parts of their products.
//
// A warp has the heads of one query as rows of matrix products, in registers where there is room. Keys pass through shared
// memory. Either warps have different queries and all keys of a tile, or the same query and different keys. Sums over heads
// are sums over rows, in a lane and then among lanes.
#pragma once

#include FA_ARCH_HEADER

#include "indexer_sequence.cuh"

namespace fastattention {

constexpr int kHeadRows = Config::head_rows, kSteps = kHeadRows / Arch::kStepRows;
constexpr int kQueries = Config::queries, kKeyWarps = kWarps / kQueries;
constexpr int kKeysOfWarp = kTileN / kKeyWarps, kGroupTiles = kKeysOfWarp < 16 ? 1 : 2, kGroupKeys = 8 * kGroupTiles;
static_assert(kSteps * Arch::kStepRows == kHeadRows && kKeysOfWarp % kGroupKeys == 0, "a warp has whole accumulators");

class KeyScores {
    using QueryCopy = TileCopy<Arch, WholeCta, uint16_t, false, kHeadRows, kHeaddim>;
    using KeyCopy = TileCopy<Arch, WholeCta, uint16_t, Config::paged, kTileN, kHeaddim>;
    static constexpr int kKeyBytes = kStages * KeyCopy::kBytes;
    // Queries in registers come through the memory of keys, as many at a time as it holds.
    static constexpr int kFitting = kKeyBytes / QueryCopy::kBytes;
    static constexpr int kTogether = !kQueriesInRegisters || kFitting > kQueries ? kQueries : kFitting;
    static_assert(kTogether > 0 && kQueries % kTogether == 0);
    static_assert(Config::shared_bytes == kKeyBytes + !kQueriesInRegisters * kQueries * QueryCopy::kBytes);

public:
    FA_DEVICE explicit KeyScores(const IndexerParams& p)
        : p_(p),
          first_row_(p.first_row + static_cast<int>(cta_index() % p.row_tiles) * kQueries),
          end_row_(first_row_ + kQueries < p.first_row + p.num_rows ? first_row_ + kQueries : p.first_row + p.num_rows),
          row_(first_row_ + query_warp()),
          first_key_(static_cast<int>(cta_index() / p.row_tiles) * p.part_keys),
          key_warp_(kKeyWarps == 1 ? 0 : warp_index() % kKeyWarps) {}

    FA_DEVICE void run() {
        if (!has_keys()) return;
        load_queries();
        for_each_sequence([&](const IndexerSequence& sequence) { run_sequence(sequence); });
    }

private:
    static FA_DEVICE int query_warp() { return kQueries == 1 ? 0 : warp_index() / kKeyWarps; }

    // Keys from first_key_ on that rows of a sequence see. Rows that see no more keys than they take need no scores.
    FA_DEVICE int end_key(const IndexerSequence& sequence) const {
        const int seen = sequence.seen_by((sequence.end_row() < end_row_ ? sequence.end_row() : end_row_) - 1);
        const int end = first_key_ + p_.part_keys;
        return seen <= p_.topk ? 0 : seen < end ? seen : end;
    }

    template <class Visit>
    FA_DEVICE void for_each_sequence(Visit visit) const {
        for (int index = sequence_of_row(p_, first_row_); index < p_.batch_size; ++index) {
            const IndexerSequence sequence(p_, index);
            visit(sequence);
            if (sequence.end_row() >= end_row_) return;
        }
    }

    FA_DEVICE bool has_keys() const {
        bool found = false;
        for_each_sequence([&](const IndexerSequence& sequence) { found |= first_key_ < end_key(sequence); });
        return found;
    }

    FA_DEVICE void load_queries() {
        const uint32_t at = shared_memory() + (kQueriesInRegisters ? 0 : kKeyBytes);
#pragma unroll
        for (int first = 0; first < kQueries; first += kTogether) {
#pragma unroll
            for (int i = 0; i < kTogether; ++i) {
                const int row = first_row_ + first + i, valid = row < end_row_ ? row : first_row_;
                QueryCopy copy({p_.q + valid * p_.q_stride_row, static_cast<int>(p_.q_stride_head), p_.nheads, p_.headdim});
                if constexpr (Arch::kAsyncCopy) {
                    copy.begin(0, at + i * QueryCopy::kBytes);
                } else {
                    copy.copy(0, at + i * QueryCopy::kBytes);
                }
            }
            if constexpr (Arch::kAsyncCopy) {
                copy_async_commit();
                copy_async_wait<0>();
            }
            cta_barrier();
            const int mine = query_warp() - first;
            if (0 <= mine && mine < kTogether) queries_.load(at + mine * QueryCopy::kBytes);
            cta_barrier();
        }
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
#pragma unroll
            for (int which = 0; which < 2; ++which) {
                const int head = step * Arch::kStepRows + Arch::row(which);
                has_head_[step][which] = head < p_.nheads && row_ < end_row_;
                weights_[step][which] = has_head_[step][which] ? p_.weights[row_ * p_.weights_stride_row + head] : 0.0f;
            }
    }

    FA_DEVICE KeyCopy keys_of(const IndexerSequence& sequence, int end) const {
        const int64_t index = sequence.index();
        const int step = static_cast<int>(p_.k_stride_row);
        if constexpr (Config::paged) {
            return KeyCopy({p_.k,
                            step,
                            end,
                            p_.headdim,
                            p_.block_table + index * p_.block_table_stride,
                            p_.k_stride_batch,
                            {p_.k_seqlen, p_.page_multiplier, p_.page_shift},
                            0});
        } else {
            const int64_t offset =
                p_.cu_seqlens_k == nullptr ? index * p_.k_stride_batch : p_.cu_seqlens_k[index] * p_.k_stride_row;
            return KeyCopy({p_.k + offset, step, end, p_.headdim});
        }
    }

    FA_DEVICE void run_sequence(const IndexerSequence& sequence) const {
        const int end = end_key(sequence);
        if (first_key_ >= end) return;
        const int seen = sequence.has(row_) && row_ < end_row_ ? sequence.seen_by(row_) : 0;
        KeyCopy keys = keys_of(sequence, end);
        if constexpr (Arch::kAsyncCopy) {
            run_pipelined(keys, end, seen);
        } else {
            run_single_buffered(keys, end, seen);
        }
        cta_barrier();  // no thread reads shared memory any more
    }

    // One barrier per tile ensures both that this tile has arrived and that no thread still reads the previous one.
    FA_DEVICE void run_pipelined(KeyCopy& keys, int end, int seen) const {
        int ahead = first_key_, stage_ahead = 0, stage = 0;
        const auto begin_next = [&] {
            if (ahead < end) keys.begin(ahead, shared_memory() + stage_ahead * KeyCopy::kBytes);
            copy_async_commit();
            ahead += kTileN;
            stage_ahead = stage_ahead + 1 == kStages ? 0 : stage_ahead + 1;
        };
#pragma unroll
        for (int i = 0; i < kStages - 1; ++i) begin_next();
        for (int key = first_key_; key < end; key += kTileN) {
            copy_async_wait<kStages - 2>();
            cta_barrier();
            begin_next();
            if (key < seen) score_tile(shared_memory() + stage * KeyCopy::kBytes, key);
            stage = stage + 1 == kStages ? 0 : stage + 1;
        }
        copy_async_wait<0>();
    }

    FA_DEVICE void run_single_buffered(KeyCopy& keys, int end, int seen) const {
        keys.begin(first_key_, shared_memory());
        for (int key = first_key_; key < end; key += kTileN) {
            keys.finish(shared_memory());
            cta_barrier();
            keys.begin(key + kTileN, shared_memory());  // rows behind `end` are not read
            if (key < seen) score_tile(shared_memory(), key);
            cta_barrier();
        }
    }

    FA_DEVICE void score_tile(uint32_t tile, int key) const {
        float* const to = p_.scores + (row_ - p_.first_row) * p_.scores_stride + key;
#pragma unroll 1
        for (int first = key_warp_ * kKeysOfWarp; first < (key_warp_ + 1) * kKeysOfWarp; first += kGroupKeys) {
            float products[kSteps][kGroupTiles][Arch::kElements] = {};
            Arch::multiply_rows(products, queries_, tile + first * KeyCopy::kPitch);
            write_sums(products, to + first);
        }
    }

    // Adds up heads, which are rows. All lanes get the sums of their columns, and those of the first row write them.
    FA_DEVICE void write_sums(const float (&products)[kSteps][kGroupTiles][Arch::kElements], float* to) const {
        constexpr int kLaneColumns = Arch::kElements / 2;
        const auto add = [](float a, float b) { return a + b; };
#pragma unroll
        for (int n = 0; n < kGroupTiles; ++n) {
            float sums[kLaneColumns] = {};
#pragma unroll
            for (int step = 0; step < kSteps; ++step)
#pragma unroll
                for (int i = 0; i < Arch::kElements; ++i) {
                    const int which = Arch::row_of_element(i);
                    float x = at_least_zero(products[step][n][i]);
                    // A row of zeros times a key that is not finite is NaN.
                    if constexpr (Config::pads_heads) x = has_head_[step][which] ? x : 0.0f;
                    float& sum = sums[Arch::column_of_element(i)];
                    sum = multiply_add(weights_[step][which], x, sum);
                }
#pragma unroll
            for (int c = 0; c < kLaneColumns; ++c) sums[c] = Arch::reduce_column(sums[c], add);
            if (Arch::row(0) != 0) continue;
#pragma unroll
            for (int i = 0; i < Arch::kElements; i += 2) {
                if (Arch::row_of_element(i) != 0) continue;
                const int c = Arch::column_of_element(i);
                // A sum that underflows may be -0, and + 0.0f makes it 0.
                store_global_64(to + Arch::score_column(n, i), {as_bits(sums[c] + 0.0f), as_bits(sums[c + 1] + 0.0f)});
            }
        }
    }

    const IndexerParams& p_;
    const int first_row_, end_row_;  // rows of the CTA
    const int row_;                  // of the warp, which may not exist
    const int first_key_, key_warp_;
    typename Arch::template Rows<kSteps, kHeaddim> queries_;
    float weights_[kSteps][2];
    bool has_head_[kSteps][2];
};

}  // namespace fastattention

extern "C" FA_KERNEL void FA_LAUNCH_BOUNDS(fastattention::kThreads, 1)
    fastattention_key_scores(FA_PARAMETER fastattention::IndexerParams params) {
    using namespace fastattention;
    KeyScores(params).run();
}
