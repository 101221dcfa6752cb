// The loop over tiles of keys and values, which pass through shared memory.
#pragma once

#include "tile_walk.cuh"
#include "warp_rows.cuh"

namespace fastattention {

// Whether all rows see all keys of a tile, if that is known at compile time.
template <bool kValue>
struct AllSeen {
    static constexpr bool value = kValue;
};

// A bias is much code already, which would have to fit the instruction cache twice. Few rows are bound by memory.
constexpr bool kSeparateFullTiles = Arch::kSeparateFullTiles && !kNaturalScores && !kGroupedRows;

// All rows of a CTA see every key from `begin` to `end` that the loop visits.
struct FullKeys {
    int begin, end;
};

// Team: the warps that share tiles of keys and values.
template <class Team>
class KeyLoop {
    using QueryCopy = TileCopy<Arch, WholeCta, uint16_t, kGroupedRows, kTileM, kHeaddim>;
    using KeyCopy = TileCopy<Arch, Team, CacheItem, kPaged, kTileN, kHeaddim, kLooksAhead>;
    using ValueCopy = TileCopy<Arch, Team, CacheItem, kPaged, kTileN, kHeaddimV, kLooksAhead>;
    using ScalesCopy = TileScales<Arch, Team>;
    using Biases = WarpRows::Biases;
    static constexpr int kValueBytes = kValuesInKeys ? 0 : ValueCopy::kBytes;

public:
    static constexpr int kQueryBytes = QueryCopy::kBytes;
    static constexpr int kTeamBytes = kStages * (KeyCopy::kBytes + kValueBytes + ScalesCopy::kBytes + Biases::kBytes);

    // q_shared: memory for the CTA's queries, starting at row first_row; kv_shared: memory for the team's keys and values;
    // exchange: memory of kExchangeBytes; tiles: at least one tile of keys. The constructor starts the first copies.
    FA_DEVICE KeyLoop(const Sources& from, uint32_t q_shared, uint32_t kv_shared, uint32_t exchange, int first_row,
                      const TileWalk& tiles, const FullKeys& full)
        : q_copy_(from.q),
          k_copy_(from.k),
          v_copy_(from.v),
          scales_copy_(from),
          biases_(from.bias, row_warp()),
          first_warp_row_(first_row + first_warp_row()),
          q_shared_(q_shared),
          kv_shared_(kv_shared),
          exchange_(exchange),
          tiles_(tiles),
          full_(full),
          ahead_(tiles.begin()) {
        k_copy_.look_up(ahead_);
        if constexpr (!kValuesInKeys) v_copy_.look_up(ahead_);
        scales_copy_.look_up(ahead_);
        if constexpr (kWideQueries) {
            q_copy_.copy(first_row, q_shared_);
        } else {
            q_copy_.begin(first_row, q_shared_);
        }
        if constexpr (kPipelined) {
            copy_async_commit();
#pragma unroll
            for (int i = 0; i < kStages - 1; ++i) begin_next();
        } else {
            begin_keys(ahead_);
        }
    }

    FA_DEVICE void run(WarpRows& rows) {
        if constexpr (kPipelined) {
            run_pipelined(rows);
        } else {
            run_single_buffered(rows);
        }
        if constexpr (kColumnWarps > 1) rows.exchange_sums(exchange_);
    }

private:
    // A thread's share of the queries would not fit its registers.
    static constexpr bool kWideQueries = !Arch::kAsyncCopy && kHeaddim > 256;
    static constexpr bool kPipelined = Arch::kAsyncCopy && kStages > 1;
    static_assert(kPipelined || !kValuesInKeys, "the next keys would come to where values are still read");

    // Keeps several tiles of keys and values in shared memory: while one is processed, the others are being copied. One
    // barrier per tile ensures both that this tile has arrived and that no thread still reads the previous one.
    FA_DEVICE void run_pipelined(WarpRows& rows) {
        copy_async_wait<kStages - 1>();
        cta_barrier();
        rows.load_queries(q_shared_);
        int stage = 0;
        for (int key = tiles_.begin(); key < tiles_.end(); key = kBlockSparse ? on_their_way_[0] : tiles_.next(key)) {
            copy_async_wait<kStages - 2>();
            Team::barrier();
            begin_next();
            const TileKind kind = rows.kind_of(key);
            if (kind != TileKind::kSkipped) {
                WarpRows::Scores scores = {};
                rows.multiply_queries(scores, k_shared(stage), key);
                const LaneScales scales(scales_shared(stage));
                rows.prepare_scores(scores, scales, biases_of(stage), key, kind);
                if constexpr (kColumnWarps > 1) {
                    rows.exchange_probabilities(scores, scales, key, exchange_);
                    rows.accumulate_exchanged(exchange_, v_shared(stage));
                } else {
                    rows.accumulate_values(scores, scales, key, v_shared(stage));
                }
            }
            stage = stage + 1 == kStages ? 0 : stage + 1;
        }
        copy_async_wait<0>();
    }

    // Starts to copy the next tile of keys and values into the next stage, if there is one more.
    FA_DEVICE void begin_next() {
        const bool more = ahead_ < tiles_.end();
        if (more) {
            begin_keys(ahead_, stage_ahead_);
            begin_values(ahead_, stage_ahead_);
        }
        copy_async_commit();
        if constexpr (kBlockSparse) {
#pragma unroll
            for (int i = 0; i < kStages - 2; ++i) on_their_way_[i] = on_their_way_[i + 1];
            on_their_way_[kStages - 2] = ahead_;
        }
        if (!kBlockSparse || more) ahead_ = tiles_.next(ahead_);  // the list ends with the last kept block
        stage_ahead_ = stage_ahead_ + 1 == kStages ? 0 : stage_ahead_ + 1;
    }

    // Keeps one tile of keys and one of values: values arrive while keys are processed, and the other way round. No barrier
    // separates the softmax from the product with the values, so exponentials of some keys overlap products of others.
    FA_DEVICE void run_single_buffered(WarpRows& rows) {
        if constexpr (!kWideQueries) q_copy_.finish(q_shared_);
        arrive(k_copy_, k_shared(0));
        if constexpr (kKeyWarps > 1) cta_barrier();
        rows.load_queries(q_shared_);
        for_each_tile([&](auto all_seen, int key) {
            begin_values(key);
            const TileKind kind = all_seen.value ? TileKind::kFull : rows.kind_of(key);
            WarpRows::Scores scores = {};
            if (kind != TileKind::kSkipped) rows.multiply_queries(scores, k_shared(0), key);
            const int next = tiles_.next(key);
            const bool more = next < tiles_.end();
            if constexpr (kColumnWarps > 1) {
                if constexpr (kQuantized) {  // scales come with the values
                    scales_copy_.finish(scales_shared(0));
                    arrive(v_copy_, v_shared(0));
                }
                const LaneScales scales(scales_shared(0));
                rows.prepare_scores(scores, scales, {}, key, kind);
                wait_for(v_copy_, v_shared(0));
                rows.exchange_probabilities(scores, scales, key, exchange_);
                if (more) begin_keys(next);
                rows.accumulate_exchanged(exchange_, v_shared(0));
            } else {
                scales_copy_.finish(scales_shared(0));
                arrive(v_copy_, v_shared(0));
                if (more) begin_keys(next);
                if (kind != TileKind::kSkipped) {
                    const LaneScales scales(scales_shared(0));
                    rows.prepare_scores(scores, scales, biases_of(0), key, kind);
                    rows.accumulate_values(scores, scales, key, v_shared(0));
                }
            }
            // This is redundant after the last tile, but a branch would split the code that the compiler interleaves.
            arrive(k_copy_, k_shared(0));
            return next;
        });
    }

    // Calls `step` for one tile of keys after the other, and tells it at compile time whether all rows of the CTA see all
    // keys of the tile. The code for such tiles has no mask, so the compiler can schedule it more freely.
    template <class Step>
    FA_DEVICE void for_each_tile(Step step) {
        for (int key = tiles_.begin(); key < tiles_.end();) {
            const bool all_seen = kSeparateFullTiles && key >= full_.begin && key + kTileN <= full_.end;
            key = all_seen ? step(AllSeen<true>{}, key) : step(AllSeen<false>{}, key);
        }
    }

    FA_DEVICE void begin_keys(int key, int stage = 0) {
        k_copy_.begin(key, k_shared(stage));
        look_ahead(k_copy_, key);
    }
    FA_DEVICE void begin_values(int key, int stage = 0) {
        if constexpr (!kValuesInKeys) {
            v_copy_.begin(key, v_shared(stage));
            look_ahead(v_copy_, key);
        }
        biases_.begin(first_warp_row_, key, biases_shared(stage));
        scales_copy_.begin(key, scales_shared(stage));
        look_ahead(scales_copy_, key);
    }

    // Looks up where the tile after the one at `key` lies. Only decodes look ahead, and they have no block mask.
    template <class Copy>
    FA_DEVICE void look_ahead(Copy& copy, int key) {
        static_assert(!(kLooksAhead && kBlockSparse), "kept tiles are asked for once");
        if constexpr (!kBlockSparse) copy.look_up(tiles_.next(key));
    }

    // No thread reads the previous contents of `to` any more: all have passed a barrier since.
    template <class Copy>
    FA_DEVICE void arrive(const Copy& copy, uint32_t to) {
        wait_for(copy, to);
        Team::barrier();
    }

    // Waits for what this thread has copied itself.
    template <class Copy>
    FA_DEVICE void wait_for(const Copy& copy, uint32_t to) {
        copy.finish(to);
        if constexpr (Arch::kAsyncCopy) {
            copy_async_commit();
            copy_async_wait<0>();
        }
    }

    FA_DEVICE uint32_t k_shared(int stage) const { return kv_shared_ + stage * KeyCopy::kBytes; }
    FA_DEVICE uint32_t v_shared(int stage) const {
        return kValuesInKeys ? k_shared(stage) : k_shared(kStages) + stage * kValueBytes;
    }
    FA_DEVICE uint32_t scales_shared(int stage) const {
        return k_shared(kStages) + kStages * kValueBytes + stage * ScalesCopy::kBytes;
    }
    FA_DEVICE uint32_t biases_shared(int stage) const { return scales_shared(kStages) + stage * Biases::kBytes; }
    FA_DEVICE StagedBiases biases_of(int stage) const { return biases_.of_warp(biases_shared(stage)); }

    QueryCopy q_copy_;
    KeyCopy k_copy_;
    ValueCopy v_copy_;
    ScalesCopy scales_copy_;
    const Biases biases_;
    const int first_warp_row_;
    const uint32_t q_shared_, kv_shared_, exchange_;
    TileWalk tiles_;
    const FullKeys full_;
    int ahead_, stage_ahead_ = 0;  // the next tile to copy, and its stage
    int on_their_way_[kBlockSparse && kStages > 1 ? kStages - 1 : 1];  // tiles that are being copied, in order
};

}  // namespace fastattention
