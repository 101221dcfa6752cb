// Merges the partial results of a decode, exactly: those of a row have a maximum, a sum and an unnormalised result each.
#pragma once

#include "results.cuh"
#include "schedule.cuh"

namespace fastattention {

constexpr int kCombineWarps = 4;  // of a CTA

// One row of one unit, by one warp: every lane has eight columns at most.
class CombineRow {
public:
    FA_DEVICE CombineRow(const AttentionParams& p, const Schedule& schedule, int64_t unit, int row)
        : p_(p), schedule_(schedule), row_(row) {
        const SequenceTiles sequence = schedule.sequence(static_cast<int>(unit / schedule.units()));
        const int unit_here = static_cast<int>(unit % schedule.units());
        batch_ = sequence.batch;
        ctas_ = schedule.ctas_of(sequence, unit_here);
        const int group_row = unit_here % p.num_m_tiles * kTileM + row;
        token_ = group_row / p.group_size;
        head_ = unit_here / p.num_m_tiles * p.group_size + group_row % p.group_size;
    }

    FA_DEVICE void run() const {
        // A unit of one CTA is finished, and the last tile of rows may not have this one.
        if (ctas_.begin == ctas_.end || token_ >= p_.seqlen_q) return;
        const int column = lane_index() * 8;
        if (column >= p_.headdim_v) return;
        RowStats stats{highest(), 0.0f};
        float results[8] = {};
        for (int64_t cta = ctas_.begin; cta <= ctas_.end; ++cta) {
            const int64_t row = row_of(cta);
            const float* of_row = p_.partial_stats + 2 * row;
            const float weight = exp2_approximate(of_row[0] - shift_of(stats.max));
            stats.sum += weight * of_row[1];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const Words4 words = load_global_128(p_.partial_out + row * p_.headdim_v + column + half * 4);
#pragma unroll
                for (int i = 0; i < 4; ++i) results[half * 4 + i] += weight * as_float(words.word[i]);
            }
        }
        write_results(p_, batch_, head_, token_, column, stats, results);
    }

private:
    FA_DEVICE int64_t row_of(int64_t cta) const {
        return schedule_.slot(cta, cta == ctas_.begin) * p_.partial_rows + row_;
    }

    FA_DEVICE float highest() const {
        float highest = -infinity();
        for (int64_t cta = ctas_.begin; cta <= ctas_.end; ++cta) highest = larger(p_.partial_stats[2 * row_of(cta)], highest);
        return highest;
    }

    const AttentionParams& p_;
    const Schedule& schedule_;
    const int row_;
    int batch_, token_, head_;
    Stretch ctas_;
};

}  // namespace fastattention

extern "C" FA_KERNEL void FA_LAUNCH_BOUNDS(fastattention::kCombineWarps * 32, 1)
    fastattention_combine(FA_PARAMETER fastattention::AttentionParams params) {
    using namespace fastattention;
    const Schedule schedule(params);
    const int64_t index = block_index() * kCombineWarps + warp_index();
    const int64_t unit = index / params.partial_rows;
    if (unit < schedule.units() * params.batch_size)
        CombineRow(params, schedule, unit, static_cast<int>(index % params.partial_rows)).run();
}
