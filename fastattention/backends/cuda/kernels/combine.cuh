// Merges the partial results of a decode, exactly: those of a row have a maximum, a sum and an unnormalised result each.
#pragma once

#include "results.cuh"
#include "schedule.cuh"

namespace fastattention {

constexpr int kCombineWarps = 4;
constexpr int kCombineColumns = kHeaddimV * kValueParts;
constexpr int kCombineShared = kCombineWarps * kCombineColumns * 4;

// One row of one unit, by a CTA: its warps share out the partial results among themselves.
class CombineRow {
public:
    FA_DEVICE CombineRow(const AttentionParams& p, int unit, int row)
        : p_(p),
          schedule_(p),
          sequence_(schedule_.sequence(unit / schedule_.units())),
          unit_(unit - sequence_.batch * schedule_.units()),
          row_(row),
          ctas_(schedule_.ctas_of(sequence_, unit_)) {}

    FA_DEVICE void run() const {
        const int kv_head = unit_ / p_.num_m_tiles;
        const int group_row = (unit_ - kv_head * p_.num_m_tiles) * kTileM + row_, token = group_row / p_.group_size;
        // A unit of one CTA is finished, and the last tile of rows may not have this one.
        if (ctas_.end - ctas_.begin == 1 || token >= p_.seqlen_q) return;
        const RowStats stats = merged_stats();
        add_up(stats.max);
        block_barrier();
        const int column = thread_index() * 8;
        if (column >= p_.headdim_v) return;
        float results[8] = {};
#pragma unroll
        for (int warp = 0; warp < kCombineWarps; ++warp)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const Words4 words = load_shared_128(shared_at(warp, column + half * 4));
#pragma unroll
                for (int i = 0; i < 4; ++i) results[half * 4 + i] += as_float(words.word[i]);
            }
        const int head = kv_head * p_.group_size + group_row - token * p_.group_size;
        write_results(p_, sequence_.batch, head, token, column, stats, results);
    }

private:
    static constexpr int kVectors = (kCombineColumns + 127) / 128;  // of four columns, that a lane has

    // Of all partial results, one a lane at a time.
    FA_DEVICE RowStats merged_stats() const {
        RowStats stats{-infinity(), 0.0f};
        for (int cta = ctas_.begin + lane_index(); cta < ctas_.end; cta += 32)
            stats.max = larger(p_.partial_stats[2 * row_of(cta)], stats.max);
        stats.max = maximum_of_lanes(stats.max);
        for (int cta = ctas_.begin + lane_index(); cta < ctas_.end; cta += 32)
            stats.sum += weight_of(cta, stats.max) * p_.partial_stats[2 * row_of(cta) + 1];
        stats.sum = sum_of_lanes(stats.sum);
        return stats;
    }

    // Leaves this warp's share of the sum in shared memory.
    FA_DEVICE void add_up(float row_max) const {
        const int warp = warp_index();
        float results[kVectors][4] = {};
#pragma unroll 4
        for (int cta = ctas_.begin + warp; cta < ctas_.end; cta += kCombineWarps) {
            const float weight = weight_of(cta, row_max);
            const float* from = p_.partial_out + row_of(cta) * p_.headdim_v;
#pragma unroll
            for (int j = 0; j < kVectors; ++j) {
                if (column_of(j) >= p_.headdim_v) continue;
                const Words4 words = load_global_128(from + column_of(j));
#pragma unroll
                for (int i = 0; i < 4; ++i) results[j][i] += weight * as_float(words.word[i]);
            }
        }
#pragma unroll
        for (int j = 0; j < kVectors; ++j) {
            if (column_of(j) >= p_.headdim_v) continue;
            const float* r = results[j];
            store_shared_128(shared_at(warp, column_of(j)), {as_bits(r[0]), as_bits(r[1]), as_bits(r[2]), as_bits(r[3])});
        }
    }

    static FA_DEVICE int column_of(int vector) { return vector * 128 + lane_index() * 4; }
    static FA_DEVICE uint32_t shared_at(int warp, int column) {
        return shared_memory() + (warp * kCombineColumns + column) * 4;
    }

    FA_DEVICE int64_t row_of(int cta) const {
        return static_cast<int64_t>(schedule_.slot(cta, cta == ctas_.begin)) * p_.partial_rows + row_;
    }

    FA_DEVICE float weight_of(int cta, float row_max) const {
        return exp2_approximate(p_.partial_stats[2 * row_of(cta)] - shift_of(row_max));
    }

    const AttentionParams& p_;
    const Schedule schedule_;
    const SequenceTiles sequence_;
    const int unit_, row_;
    const Stretch ctas_;
};

}  // namespace fastattention

extern "C" FA_KERNEL void FA_LAUNCH_BOUNDS(fastattention::kCombineWarps * 32, 1)
    fastattention_combine(FA_PARAMETER fastattention::AttentionParams params) {
    const int row = static_cast<int>(fastattention::block_index()), unit = row / params.partial_rows;
    fastattention::CombineRow(params, unit, row - unit * params.partial_rows).run();
}
