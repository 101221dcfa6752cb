// Merges the partial results of a decode, exactly: those of a row have a maximum, a sum and an unnormalised result each.
#pragma once

#include "results.cuh"
#include "schedule.cuh"

namespace fastattention {

constexpr int kCombineWarps = 8;
constexpr int kCombineColumns = kHeaddimV * kValueParts;
constexpr int kCombineShared = kCombineWarps * (kCombineColumns + 1) * 4;

// One row of a unit of a sequence, by a CTA: its warps share out the partial results among themselves.
class CombineRow {
public:
    FA_DEVICE CombineRow(const AttentionParams& p, int batch, int unit, int row)
        : p_(p), schedule_(p), batch_(batch), unit_(unit), row_(row), groups_(schedule_.groups_of(schedule_.sequence(batch))) {}

    FA_DEVICE void run() const {
        const int kv_head = quotient(unit_, p_.num_m_tiles);
        const int group_row = (unit_ - kv_head * p_.num_m_tiles) * kTileM + row_, token = token_of(p_, group_row);
        // What lies in one stretch is finished, and the last tile of rows may not have this one.
        if (groups_.end - groups_.begin == 1 || token >= p_.seqlen_q) return;
        // What is read above was there before the decode.
        wait_for_previous_kernel();
        add_up();
        const RowStats stats = merged_stats();
        block_barrier();
        const int column = thread_index() * 8;
        if (column >= p_.headdim_v) return;
        float results[8] = {};
#pragma unroll
        for (int warp = 0; warp < kCombineWarps; ++warp) {
            const float weight = exp2_approximate(as_float(load_shared_32(maximum_at(warp))) - shift_of(stats.max));
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const Words4 words = load_shared_128(values_at(warp, column + half * 4));
#pragma unroll
                for (int i = 0; i < 4; ++i) results[half * 4 + i] += weight * as_float(words.word[i]);
            }
        }
        const int head = kv_head * p_.group_size + group_row - token * p_.group_size;
        write_results(p_, batch_, head, token, column, stats, results);
    }

private:
    static constexpr int kVectors = (kCombineColumns + 127) / 128;  // of four columns, that a lane has
    static constexpr int kTogether = 8;                             // partial results that a warp waits for at once

    // Of all partial results, one a lane at a time.
    FA_DEVICE RowStats merged_stats() const {
        RowStats stats{-infinity(), 0.0f};
        for (int group = groups_.begin + lane_index(); group < groups_.end; group += 32) {
            const float* part = p_.partial_stats + 2 * row_of(group);
            const float highest = larger(part[0], stats.max);
            stats.sum = stats.sum * exp2_approximate(stats.max - shift_of(highest)) +
                        part[1] * exp2_approximate(part[0] - shift_of(highest));
            stats.max = highest;
        }
        const float highest = maximum_of_lanes(stats.max);
        return {highest, sum_of_lanes(stats.sum * exp2_approximate(stats.max - shift_of(highest)))};
    }

    // Leaves the sum of this warp's share in shared memory, relative to its own maximum: nothing here waits for anything but
    // the partial results themselves.
    FA_DEVICE void add_up() const {
        const int warp = warp_index();
        float highest = -infinity(), results[kVectors][4] = {};
        for (int first = groups_.begin + warp; first < groups_.end; first += kTogether * kCombineWarps)
            add_some(first, highest, results);
#pragma unroll
        for (int j = 0; j < kVectors; ++j) {
            if (column_of(j) >= p_.headdim_v) continue;
            const float* r = results[j];
            store_shared_128(values_at(warp, column_of(j)), {as_bits(r[0]), as_bits(r[1]), as_bits(r[2]), as_bits(r[3])});
        }
        if (lane_index() == 0) store_shared_32(maximum_at(warp), as_bits(highest));
    }

    // The parts of group `first` and of every kCombineWarps-th after it, kTogether in all.
    FA_DEVICE void add_some(int first, float& highest, float (&results)[kVectors][4]) const {
        float maxima[kTogether];
        Words4 words[kTogether][kVectors];
        float new_highest = highest;
#pragma unroll
        for (int k = 0; k < kTogether; ++k) {
            const int group = first + k * kCombineWarps;
            const bool valid = group < groups_.end;
            maxima[k] = valid ? p_.partial_stats[2 * row_of(group)] : -infinity();
            new_highest = larger(maxima[k], new_highest);
#pragma unroll
            for (int j = 0; j < kVectors; ++j)
                words[k][j] = valid && column_of(j) < p_.headdim_v
                                  ? load_global_128(p_.partial_out + row_of(group) * p_.headdim_v + column_of(j))
                                  : Words4{};
        }
        const float factor = exp2_approximate(highest - shift_of(new_highest));
        highest = new_highest;
#pragma unroll
        for (int j = 0; j < kVectors; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) results[j][i] *= factor;
#pragma unroll
        for (int k = 0; k < kTogether; ++k) {
            const float weight = exp2_approximate(maxima[k] - shift_of(highest));
#pragma unroll
            for (int j = 0; j < kVectors; ++j)
#pragma unroll
                for (int i = 0; i < 4; ++i) results[j][i] += weight * as_float(words[k][j].word[i]);
        }
    }

    static FA_DEVICE int column_of(int vector) { return vector * 128 + lane_index() * 4; }
    static FA_DEVICE uint32_t values_at(int warp, int column) {
        return shared_memory() + (warp * kCombineColumns + column) * 4;
    }
    static FA_DEVICE uint32_t maximum_at(int warp) { return values_at(kCombineWarps, warp); }

    FA_DEVICE int64_t row_of(int group) const {
        return static_cast<int64_t>(schedule_.slot(group, group == groups_.begin, unit_)) * p_.partial_rows + row_;
    }

    const AttentionParams& p_;
    const Schedule schedule_;
    const int batch_, unit_, row_;
    const Stretch groups_;  // that have parts of the sequence
};

}  // namespace fastattention

extern "C" FA_KERNEL void FA_LAUNCH_BOUNDS(fastattention::kCombineWarps * 32, 1)
    fastattention_combine(FA_PARAMETER fastattention::AttentionParams params) {
    using namespace fastattention;
    const int row = static_cast<int>(block_index()), place = quotient(row, params.partial_rows);
    const int batch = quotient(place, params.num_units);
    CombineRow(params, batch, place - batch * params.num_units, row - place * params.partial_rows).run();
}
