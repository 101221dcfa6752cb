// Attention of few query rows over many keys (split-KV). CTAs divide the keys of all sequences evenly (schedule.cuh), read
// the keys of a key head once for all query heads of its group, and write partial results. The last CTA of a unit merges
// them when they are few, combine.cuh when they are many.
//
// The kernel is bound by memory bandwidth. So each warp has its own keys and prefetches them without waiting for other
// warps; the warps' results are merged only at the end of a span. With more rows than a warp can hold, the warps divide the
// rows instead and share the keys in shared memory.
#pragma once

#include "combine.cuh"
#include "key_loop.cuh"

namespace fastattention {

template <bool kIsOneWarp>
struct TeamOf {
    using Type = WholeCta;
};
template <>
struct TeamOf<true> {
    using Type = OneWarp;
};

using Loop = KeyLoop<TeamOf<kSplitKeysAcrossWarps>::Type>;

// The warps' results are merged in the memory of queries, keys and values, as many columns at a time as fit.
constexpr int kLoopBytes = Loop::kQueryBytes + kKeyWarps * Loop::kTeamBytes;
constexpr int kResultRows = kKeyWarps * kTileM;

FA_DEVICE constexpr int merge_pitch(int columns) { return columns * 4 + 16; }
FA_DEVICE constexpr int merged_together() {
    int columns = kHeaddimV;
    for (int parts = 1; kResultRows * merge_pitch(columns) > kLoopBytes || columns % 16 != 0; ++parts)
        columns = kHeaddimV / parts;
    return columns;
}

constexpr int kMergeColumns = merged_together();
constexpr int kMergePitch = merge_pitch(kMergeColumns);
constexpr int kMergeParts = kHeaddimV / kMergeColumns;
static_assert(kMergeParts * kMergeColumns == kHeaddimV, "parts are equally wide");

static_assert(kLoopBytes + kResultRows * 8 + kExchangeBytes == Config::shared_bytes);

// The part of a sequence that a CTA attends to.
struct SequenceSpan {
    Work work;
    int first_tile, end_tile;
    bool is_whole;  // the part is the whole sequence
    int slot;       // where its partial result goes if it is not
};

class Decode {
public:
    FA_DEVICE explicit Decode(const AttentionParams& p)
        : p_(p), shared_(shared_memory()), stats_shared_(shared_ + kLoopBytes) {}

    FA_DEVICE void run() const {
        const CachedTokens of_lane = cached_tokens_of_lane(p_, 0);  // loaded early, as memory is slow
        const int cta = static_cast<int>(cta_index()) / kValueParts;
        const int cta_group = units_divisor(p_).quotient_of(cta), unit = cta - cta_group * p_.num_units;
        const Schedule schedule(p_, of_lane);
        if (cta_group >= schedule.num_cta_groups()) return;
        TileSpan rest = schedule.span(cta_group);
        if (rest.begin >= rest.end) return;
        SequenceTiles sequence = schedule.sequence_with(rest.begin, cta_group);
        while (true) {
            const int first = rest.begin - sequence.begin, end = smaller(rest.end, sequence.end) - sequence.begin;
            const bool is_whole = first == 0 && sequence.begin + end == sequence.end;
            const SequenceSpan span{work_of(sequence.batch, unit), first, end, is_whole,
                                    schedule.slot(cta_group, first == 0, unit)};
            attend(span);
            if (!is_whole && p_.counters != nullptr) merge_partials(schedule, sequence, unit, span.work);
            rest.begin = sequence.begin + end;
            if (rest.begin >= rest.end) return;
            sequence = schedule.next(sequence);
            cta_barrier();  // no thread reads shared memory any more
        }
    }

private:
    FA_DEVICE Work work_of(int batch, int unit) const {
        const int kv_head = quotient(unit, p_.num_m_tiles);
        return {unit - kv_head * p_.num_m_tiles, kv_head * p_.group_size, kv_head, batch,
                static_cast<int>(cta_index()) % kValueParts * kHeaddimV};
    }

    FA_DEVICE void attend(const SequenceSpan& span) const {
        const Work& work = span.work;
        const BasicTileRange<int> mask = mask_of(p_, work.batch);
        const int num_rows = grouped_rows(p_), first_row = work.m_tile * kTileM;
        const int last_row = smaller(first_row + kTileM, num_rows) - 1;
        const int base = Schedule::first_key(mask);
        const int end = smaller(base + span.end_tile * kStreamTile, mask.row_end(p_.seqlen_q - 1));
        const int team = kSplitKeysAcrossWarps ? warp_index() : 0;
        const TileWalk tiles(base + span.first_tile * kStreamTile + team * kTileN, end, kStreamTile);
        const uint32_t kv_shared = shared_ + Loop::kQueryBytes + team * Loop::kTeamBytes;
        const uint32_t exchange = stats_shared_ + kResultRows * 8;
        Loop loop(sources_of(p_, work, num_rows, end), shared_, kv_shared, exchange, first_row, tiles, {0, 0});
        WarpRows rows(p_, work, mask, last_row);
        loop.run(rows);
        if (!is_within_capacity(p_, work.batch)) {
            rows.set_nan();
            report_length(p_, work.batch);
        }
        rows.leave_stats(stats_shared_ + team * kTileM * 8);
#pragma unroll
        for (int part = 0; part < kMergeParts; ++part) {
            cta_barrier();  // no thread reads this memory any more
            rows.template leave_values<kMergeColumns>(shared_ + team * kTileM * kMergePitch, kMergePitch, part);
            cta_barrier();
            merge(span, last_row - first_row + 1, part);
        }
    }

    // Every thread merges eight columns of a row at a time.
    FA_DEVICE void merge(const SequenceSpan& span, int num_rows, int part) const {
        constexpr int kChunks = kMergeColumns / 8;
        for (int i = thread_index(); i < num_rows * kChunks; i += kThreads) {
            const int row = i / kChunks, chunk = i % kChunks;
            const int column = span.work.first_column + part * kMergeColumns + chunk * 8;
            if (column >= p_.headdim_v) continue;
            float results[8] = {};
            const RowStats stats = merge_row(row, chunk * 8, results);
            if (span.is_whole) {
                const int at = span.work.m_tile * kTileM + row;
                write_eight(p_, span.work.batch, head_of(p_, span.work, at), token_of(p_, at), column, stats, results);
            } else {
                leave_partial(static_cast<int64_t>(span.slot) * p_.partial_rows + row, column, stats, results);
            }
        }
    }

    FA_DEVICE RowStats merge_row(int row, int column, float (&results)[8]) const {
        RowStats stats{-infinity(), 0.0f};
        RowStats of_warp[kKeyWarps];
#pragma unroll
        for (int warp = 0; warp < kKeyWarps; ++warp) {
            const Words2 words = load_shared_64(stats_shared_ + (warp * kTileM + row) * 8);
            of_warp[warp] = {as_float(words.word[0]), as_float(words.word[1])};
            stats.max = larger(of_warp[warp].max, stats.max);
        }
#pragma unroll
        for (int warp = 0; warp < kKeyWarps; ++warp) {
            const float weight = rescaling(of_warp[warp].max, stats.max);
            stats.sum += weight * of_warp[warp].sum;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const uint32_t of_row = shared_ + (warp * kTileM + row) * kMergePitch;
                const Words4 words = load_shared_128(of_row + (column + half * 4) * 4);
#pragma unroll
                for (int i = 0; i < 4; ++i) results[half * 4 + i] += weight * as_float(words.word[i]);
            }
        }
        return stats;
    }

    FA_DEVICE void leave_partial(int64_t row, int column, const RowStats& stats, const float (&results)[8]) const {
        float* to = p_.partial_out + row * p_.headdim_v + column;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float* from = results + half * 4;
            store_global_128(to + half * 4, {as_bits(from[0]), as_bits(from[1]), as_bits(from[2]), as_bits(from[3])});
        }
        if (column == 0) {
            p_.partial_stats[2 * row] = stats.max;
            p_.partial_stats[2 * row + 1] = stats.sum;
        }
    }

    // The CTA that stores a unit's last part merges all of its parts in the order of CTA groups. Half a warp merges one row.
    FA_DEVICE void merge_partials(const Schedule& schedule, const SequenceTiles& sequence, int unit, const Work& work) const {
        const TileSpan cta_groups = schedule.cta_groups_of(sequence);
        memory_fence();
        cta_barrier();
        if (thread_index() == 0) {
            int32_t* counter = p_.counters + sequence.batch * p_.num_units + unit;
            store_shared_32(stats_shared_, count_up(counter, cta_groups.end - cta_groups.begin));
        }
        cta_barrier();
        if (load_shared_32(stats_shared_) == 0) return;
        memory_fence();
#pragma unroll 1
        for (int first = warp_index() * kRowsOfWarp; first < p_.partial_rows; first += kWarps * kRowsOfWarp) {
            const int row = first + half_of_warp(), at = work.m_tile * kTileM + row;
            const bool exists = row < p_.partial_rows && at < grouped_rows(p_);
            const MergedRow merged = PartialRow(p_, schedule, cta_groups, unit, row, exists).merged<kPartsTogether>(0, 1);
            if (exists) write_row(p_, work.batch, head_of(p_, work, at), token_of(p_, at), merged);
        }
    }

    const AttentionParams& p_;
    const uint32_t shared_, stats_shared_;
};

}  // namespace fastattention

extern "C" FA_KERNEL void FA_LAUNCH_BOUNDS(fastattention::kThreads, fastattention::Config::min_ctas)
    fastattention_decode(FA_PARAMETER fastattention::AttentionParams params) {
    using namespace fastattention;
    wait_for_previous_kernel();
    let_next_kernel_start();
    Decode(params).run();
}
