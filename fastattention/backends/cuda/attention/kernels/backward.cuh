// Gradients of a tile of rows of one head. Either the rows are keys and values, and the kernel loops over the queries of all
// heads that share them; or the rows are queries, and it loops over keys and values. Tiles are added in a fixed order, so
// results are deterministic, unless the gradients of queries are summed in memory while rows are keys (query_sums.cuh).
#pragma once

#include "gradient_rows.cuh"
#include "query_sums.cuh"

namespace fastattention {

// Copies the stats (lse, delta, share) of kCount queries, each into its own plane of floats.
template <int kCount>
class StatsCopy {
public:
    static constexpr int kBytes = kStatsPlanes * kCount * 4;
    static_assert(kCount <= kThreads, "a thread copies one of a plane");

    // stats: points to the stats of the first query.
    FA_DEVICE StatsCopy(const BackwardParams& params, const float* stats, int num_queries)
        : params_(params), stats_(stats), num_queries_(num_queries) {}

    FA_DEVICE void begin(int first, uint32_t to) {
        const int at = thread_index();
        const bool valid = at < kCount && first + at < num_queries_;
#pragma unroll
        for (int plane = 0; plane < kStatsPlanes; ++plane) {
            // delta is read only when scores are differentiated.
            const int of_stats = plane == 0 ? 0 : kGradFirst ? plane : 2;
            const float* from = stats_ + of_stats * params_.num_rows + first + at;
            if constexpr (Arch::kAsyncCopy) {
                if (at < kCount) copy_async_32(to + (plane * kCount + at) * 4, from, valid);
            } else {
                staged_[plane] = valid ? *from : 0.0f;
            }
        }
    }

    FA_DEVICE void finish(uint32_t to) const {
        const int at = thread_index();
        if (Arch::kAsyncCopy || at >= kCount) return;
#pragma unroll
        for (int plane = 0; plane < kStatsPlanes; ++plane)
            store_shared_32(to + (plane * kCount + at) * 4, as_bits(staged_[plane]));
    }

private:
    const BackwardParams& params_;
    const float* const stats_;
    const int num_queries_;
    float staged_[kStatsPlanes];
};

// Copies the tiles that the kernel loops over: first and second vectors, and stats if they are queries.
class PassingTiles {
    using FirstCopy = TileCopy<Arch, WholeCta, uint16_t, false, kTileN, kHeaddim>;
    using SecondCopy = TileCopy<Arch, WholeCta, uint16_t, false, kTileN, kHeaddimV>;

public:
    using Stats = StatsCopy<kTileN>;
    using Biases = GradientRows::Biases;
    static constexpr int kBytes =
        FirstCopy::kBytes + SecondCopy::kBytes + (kRowsAreKeys ? Stats::kBytes : 0) + Biases::kBytes;

    // first_row: of the CTA.
    FA_DEVICE PassingTiles(const SourceRows<uint16_t, false>& first, const SourceRows<uint16_t, false>& second,
                           const Stats& stats, const SourceRows<uint16_t, false>& biases, int first_row)
        : first_(first),
          second_(second),
          stats_(stats),
          biases_(biases, warp_index()),
          warp_row_(first_row + first_warp_row()) {}

    FA_DEVICE void begin(int column, uint32_t to) {
        begin_first(column, to);
        begin_second(column, to);
        const int of_warp = column + first_warp_key();
        biases_.begin(kRowsAreKeys ? of_warp : warp_row_, kRowsAreKeys ? warp_row_ : of_warp, biases_shared(to));
    }

    FA_DEVICE void begin_first(int column, uint32_t to) {
        first_.begin(column, to);
        if constexpr (kRowsAreKeys) stats_.begin(column, stats_of(to));
    }

    FA_DEVICE void begin_second(int column, uint32_t to) { second_.begin(column, second_of(to)); }

    FA_DEVICE void finish(uint32_t to) const {
        first_.finish(to);
        second_.finish(second_of(to));
        if constexpr (kRowsAreKeys) stats_.finish(stats_of(to));
    }

    static FA_DEVICE uint32_t second_of(uint32_t tile) { return tile + FirstCopy::kBytes; }
    static FA_DEVICE uint32_t stats_of(uint32_t tile) { return second_of(tile) + SecondCopy::kBytes; }
    FA_DEVICE StagedBiases biases_of(uint32_t tile) const { return biases_.of_warp(biases_shared(tile)); }

private:
    static FA_DEVICE uint32_t biases_shared(uint32_t tile) { return tile + kBytes - Biases::kBytes; }

    FirstCopy first_;
    SecondCopy second_;
    Stats stats_;
    const Biases biases_;
    const int warp_row_;
};

using FirstRows = TileCopy<Arch, WholeCta, uint16_t, false, kTileM, kHeaddim>;
using SecondRows = TileCopy<Arch, WholeCta, uint16_t, false, kTileM, kHeaddimV>;
using RowStatsCopy = StatsCopy<kTileM>;

// Gradients are staged in the shared memory of their rows; gradients of values alone in the memory of the keys.
constexpr int kGradientOfValueBytes = kTileM * pitch_of<2>(kHeaddimV);
constexpr int kFirstBytes =
    kGradFirst || FirstRows::kBytes > kGradientOfValueBytes ? FirstRows::kBytes : kGradientOfValueBytes;
constexpr int kSecondBytes = kGradFirst ? SecondRows::kBytes : 0;
constexpr int kRowBytes = kFirstBytes + kSecondBytes + (kRowsAreKeys ? 0 : RowStatsCopy::kBytes);
static_assert(kRowBytes + kStages * PassingTiles::kBytes + kLeftBytes + TileWalk::kSharedBytes == Config::shared_bytes);

class BackwardTile {
public:
    FA_DEVICE BackwardTile(const BackwardParams& params, const Work& work, const BasicTileRange<int>& mask)
        : params_(params), p_(params.call), work_(work), mask_(mask), shared_(shared_memory()) {}

    FA_DEVICE void run() {
        const int first_row = work_.m_tile * kTileM, last_row = smaller(first_row + kTileM, num_rows()) - 1;
        GradientRows rows(params_, work_, mask_, last_row);
        const int begin = mask_.row_begin(first_row) / kTileN * kTileN, end = mask_.row_end(last_row);
        if (begin < end) {
            copy_rows(first_row);
            rows.load(shared_, second_shared(), second_shared() + kSecondBytes);
            const int heads = kRowsAreKeys ? p_.group_size : 1,
                      first_head = kRowsAreKeys ? work_.kv_head * heads : work_.head;
            for (int head = first_head; head < first_head + heads; ++head) {
                rows.begin_head(head);
                pass(rows, head, begin, end);
            }
            if constexpr (kBlockSparse) {  // if no tile was added, no thread has waited for the rows
                if constexpr (Arch::kAsyncCopy) {
                    copy_async_commit();
                    copy_async_wait<0>();
                }
                cta_barrier();
            }
        }
        rows.finish(shared_, kGradFirst ? second_shared() : shared_);
    }

private:
    static constexpr bool kPipelined = Arch::kAsyncCopy && kStages > 1;
    // Whether second, and also first, vectors of the next tile fit registers during the last product of this one.
    static constexpr bool kSecondEarly = !Arch::kAsyncCopy && !kModifiesScores && !kDrops;
    static constexpr bool kFirstEarly = kSecondEarly && kHeaddim + kHeaddimV <= 128;

    // Copies the CTA's own rows. All threads can read them after the next barrier.
    FA_DEVICE void copy_rows(int first_row) const {
        FirstRows first(vectors(kRowsAreKeys ? Kind::kKeys : Kind::kQueries, work_.head, num_rows()));
        copy(first, first_row, shared_);
        if constexpr (kGradFirst) {
            SecondRows second(vectors(kRowsAreKeys ? Kind::kValues : Kind::kGradients, work_.head, num_rows()));
            copy(second, first_row, second_shared());
        }
        if constexpr (!kRowsAreKeys) {
            RowStatsCopy stats(params_, params_.stats + stats_offset(work_.head), num_rows());
            stats.begin(first_row, second_shared() + kSecondBytes);
            stats.finish(second_shared() + kSecondBytes);
        }
    }

    template <class Copy>
    static FA_DEVICE void copy(Copy& rows, int first_row, uint32_t to) {
        if constexpr (Arch::kAsyncCopy) {
            rows.begin(first_row, to);
        } else {
            rows.copy(first_row, to);
        }
    }

    // Adds all tiles for one query head. On return, no thread reads them any more.
    FA_DEVICE void pass(GradientRows& rows, int head, int begin, int end) const {
        const int num_columns = mask_.seqlen_k;  // rows of what the kernel loops over
        const int first_row = work_.m_tile * kTileM, last_row = smaller(first_row + kTileM, num_rows()) - 1;
        SourceRows<uint16_t, false> biases{};
        if constexpr (kStagesBias) biases = bias_rows(p_, work_.batch, head, kRowsAreKeys ? num_columns : num_rows());
        PassingTiles tiles(vectors(kRowsAreKeys ? Kind::kQueries : Kind::kKeys, head, num_columns),
                           vectors(kRowsAreKeys ? Kind::kGradients : Kind::kValues, head, num_columns),
                           {params_, params_.stats + stats_offset(head), num_columns}, biases, first_row);
        const uint32_t list_shared = shared_ + Config::shared_bytes - TileWalk::kSharedBytes;
        TileWalk walk(p_, {work_.batch, head, kRowsAreKeys, first_row, last_row}, begin, end, list_shared);
        if (walk.begin() >= walk.end()) return;
        if constexpr (kPipelined) {
            pass_pipelined(rows, tiles, walk);
        } else {
            pass_single_buffered(rows, tiles, walk);
        }
    }

    // The next tile waits in registers until no thread reads this one any more. An asynchronous copy starts only then.
    FA_DEVICE void pass_single_buffered(GradientRows& rows, PassingTiles& tiles, TileWalk& walk) const {
        if constexpr (!Arch::kAsyncCopy) tiles.begin(walk.begin(), passing(0));
        for (int column = walk.begin(), next; column < walk.end(); column = next) {
            next = walk.next(column);
            if constexpr (Arch::kAsyncCopy) {
                tiles.begin(column, passing(0));
                copy_async_commit();
                copy_async_wait<0>();
            } else {
                tiles.finish(passing(0));
            }
            cta_barrier();
            // This is redundant after the last tile, but a branch would split the code that the compiler interleaves.
            add_tile(rows, tiles, column, 0, [&] {
                if constexpr (kSecondEarly) tiles.begin_second(next, passing(0));
                if constexpr (kFirstEarly) tiles.begin_first(next, passing(0));
            });
            if constexpr (!Arch::kAsyncCopy && !kSecondEarly) tiles.begin_second(next, passing(0));
            if constexpr (!Arch::kAsyncCopy && !kFirstEarly) tiles.begin_first(next, passing(0));
            cta_barrier();
        }
    }

    // While one tile is processed, the next is being copied. One barrier per tile ensures both that this tile has arrived
    // and that no thread still reads the previous one.
    FA_DEVICE void pass_pipelined(GradientRows& rows, PassingTiles& tiles, TileWalk& walk) const {
        const auto begin_tile = [&](int column, int stage) {
            if (column < walk.end()) tiles.begin(column, passing(stage));
            copy_async_commit();
        };
        static_assert(kStages <= 2, "one tile is on its way");
        begin_tile(walk.begin(), 0);
        int stage = 0;
        for (int column = walk.begin(), next; column < walk.end(); column = next) {
            copy_async_wait<kStages - 2>();
            cta_barrier();
            next = walk.next(column);
            begin_tile(next, stage == 0 ? kStages - 1 : stage - 1);
            add_tile(rows, tiles, column, stage, [] {});
            stage = stage + 1 == kStages ? 0 : stage + 1;
        }
        copy_async_wait<0>();
        cta_barrier();
    }

    template <class BeginNext>
    FA_DEVICE void add_tile(GradientRows& rows, const PassingTiles& tiles, int column, int stage,
                            BeginNext begin_next) const {
        const TileKind kind = rows.kind_of(column);
        const uint32_t tile = passing(stage);
        // Where warps wait for each other, none may leave out a tile.
        if (kind == TileKind::kSkipped && !kLeavesScores) return begin_next();
        GradientRows::Scores weights = {}, grads = {};
        const uint32_t second = PassingTiles::second_of(tile);
        if (kind != TileKind::kSkipped)
            rows.score(weights, grads, tile, second, PassingTiles::stats_of(tile), tiles.biases_of(tile), column, kind);
        if constexpr (kLeavesScores) rows.leave(weights, grads, left_scores());
        if constexpr (kColumnWarps > 1) cta_barrier();
        rows.accumulate(weights, grads, tile, second, left_scores(), begin_next);
        if constexpr (kSumsQueries) {
            if constexpr (kColumnWarps == 1) cta_barrier();
            add_to_queries<Arch>(params_, work_.batch, rows.head(), column, mask_.seqlen_k, left_scores(), shared_);
        }
    }

    enum class Kind { kQueries, kGradients, kKeys, kValues };

    // The vectors of one kind of this sequence. head: the query head.
    FA_DEVICE SourceRows<uint16_t, false> vectors(Kind kind, int head, int num_rows) const {
        const auto rows = [&](const void* base, int64_t stride_batch, int64_t stride_row, int64_t stride_head, int head_of_it,
                              const int32_t* cu_seqlens, int columns) {
            const uint16_t* first = static_cast<const uint16_t*>(base) + work_.batch * stride_batch +
                                    first_token(cu_seqlens, work_.batch) * stride_row + head_of_it * stride_head;
            return SourceRows<uint16_t, false>{first, static_cast<int>(stride_row), num_rows, columns};
        };
        switch (kind) {
            case Kind::kQueries:
                return rows(p_.q, p_.q_stride_batch, p_.q_stride_row, p_.q_stride_head, head, p_.cu_seqlens_q, p_.headdim);
            case Kind::kGradients:
                return rows(params_.grad_out, p_.out_stride_batch, p_.out_stride_row, p_.out_stride_head, head,
                            p_.cu_seqlens_q, p_.headdim_v);
            case Kind::kKeys:
                return rows(p_.k, p_.k_stride_batch, p_.k_stride_row, p_.k_stride_head, work_.kv_head, p_.cu_seqlens_k,
                            p_.headdim);
            default:
                return rows(p_.v, p_.v_stride_batch, p_.v_stride_row, p_.v_stride_head, work_.kv_head, p_.cu_seqlens_k,
                            p_.headdim_v);
        }
    }

    // The index of a head's first query among the stats of all queries.
    FA_DEVICE int64_t stats_offset(int head) const {
        return work_.batch * p_.lse_stride_batch + head * p_.lse_stride_head + first_token(p_.cu_seqlens_q, work_.batch);
    }

    FA_DEVICE int num_rows() const { return mask_.seqlen_q; }  // see mask_of_rows

    FA_DEVICE uint32_t second_shared() const { return shared_ + kFirstBytes; }
    FA_DEVICE uint32_t passing(int stage) const { return shared_ + kRowBytes + stage * PassingTiles::kBytes; }
    FA_DEVICE uint32_t left_scores() const { return passing(kStages); }

    const BackwardParams& params_;
    const AttentionParams& p_;
    const Work& work_;
    const BasicTileRange<int>& mask_;
    const uint32_t shared_;
};

// The mask with the kernel's rows in the place of queries, even if they are keys. Key j is seen by queries
// j - offset - right to j - offset + left.
FA_DEVICE BasicTileRange<int> mask_of_rows(const AttentionParams& p, int batch) {
    const BasicTileRange<int> mask = mask_of(p, batch);
    if constexpr (!kRowsAreKeys) return mask;
    return {mask.seqlen_k, mask.seqlen_q, mask.right, mask.left};
}

// CTAs whose rows see the most columns under a causal mask start first.
FA_DEVICE Work work_of_backward(const AttentionParams& p) {
    Work work = find_work(p, kRowsAreKeys ? p.nheads / p.group_size : p.nheads);
    if constexpr (kRowsAreKeys) {
        work.m_tile = p.num_m_tiles - 1 - work.m_tile;
        work.kv_head = work.head;
    }
    // CTAs may divide the columns of a gradient among themselves.
    work.first_column = static_cast<int>(cta_index() % kValueParts) * (kGradFirst ? kHeaddim : kHeaddimV) / kValueParts;
    return work;
}

}  // namespace fastattention

extern "C" FA_KERNEL void FA_LAUNCH_BOUNDS(fastattention::kThreads, fastattention::Config::min_ctas)
    fastattention_backward(FA_PARAMETER fastattention::BackwardParams params) {
    using namespace fastattention;
    const Work work = work_of_backward(params.call);
    const BasicTileRange<int> mask = mask_of_rows(params.call, work.batch);
    if (work.m_tile * kTileM >= mask.seqlen_q) return;
    BackwardTile(params, work, mask).run();
}
