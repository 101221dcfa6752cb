// Partial results of a decode: who left which, and how they are merged, exactly. Those of a row have a maximum, a sum and an
// unnormalised result each.
#pragma once

#include "results.cuh"
#include "schedule.cuh"

namespace fastattention {

constexpr int kColumnsOfRow = kHeaddimV * kValueParts;
constexpr int kVectorsOfLane = (kColumnsOfRow + 127) / 128;  // of four columns: lane l has columns 4 l, 4 l + 128, ...

FA_DEVICE int column_of_lane(int vector) { return vector * 128 + lane_index() * 4; }

// What a warp has merged of a row.
struct MergedRow {
    RowStats stats{-infinity(), 0.0f};
    float values[kVectorsOfLane][4] = {};

    // Takes the partial results of some groups. All of them are on their way at once, for each takes as long as all
    // together.
    template <int kCount>
    FA_DEVICE void add(const RowStats (&parts)[kCount], const Words4 (&words)[kCount][kVectorsOfLane]) {
        float highest = stats.max;
#pragma unroll
        for (int k = 0; k < kCount; ++k) highest = larger(parts[k].max, highest);
        rescale(highest);
#pragma unroll
        for (int k = 0; k < kCount; ++k) {
            const float weight = exp2_approximate(parts[k].max - shift_of(highest));
            stats.sum += weight * parts[k].sum;
#pragma unroll
            for (int j = 0; j < kVectorsOfLane; ++j)
#pragma unroll
                for (int i = 0; i < 4; ++i) values[j][i] += weight * as_float(words[k][j].word[i]);
        }
    }

private:
    FA_DEVICE void rescale(float highest) {
        const float factor = exp2_approximate(stats.max - shift_of(highest));
        stats = {highest, stats.sum * factor};
#pragma unroll
        for (int j = 0; j < kVectorsOfLane; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) values[j][i] *= factor;
    }
};

// The partial results of one row of a unit.
struct PartialRow {
    const AttentionParams& p;
    const Schedule& schedule;
    Stretch groups;  // that have parts of the sequence
    int unit, row;

    // Merges those of group `first` and of every `step`-th after it.
    FA_DEVICE MergedRow merged(int first, int step) const {
        constexpr int kTogether = 8;
        MergedRow result;
        for (; first < groups.end; first += kTogether * step) {
            RowStats parts[kTogether];
            Words4 words[kTogether][kVectorsOfLane];
#pragma unroll
            for (int k = 0; k < kTogether; ++k) read(first + k * step, parts[k], words[k]);
            result.add(parts, words);
        }
        return result;
    }

private:
    FA_DEVICE void read(int group, RowStats& stats, Words4 (&words)[kVectorsOfLane]) const {
        const int64_t at = static_cast<int64_t>(schedule.slot(group, group == groups.begin, unit)) * p.partial_rows + row;
        const bool valid = group < groups.end;
        const Words2 pair = valid ? load_written_64(p.partial_stats + 2 * at) : Words2{{as_bits(-infinity()), 0}};
        stats = {as_float(pair.word[0]), as_float(pair.word[1])};
#pragma unroll
        for (int j = 0; j < kVectorsOfLane; ++j)
            words[j] = valid && column_of_lane(j) < p.headdim_v
                           ? load_written_128(p.partial_out + at * p.headdim_v + column_of_lane(j))
                           : Words4{};
    }
};

// Writes out and lse of a row.
FA_DEVICE void write_row(const AttentionParams& p, int batch, int head, int token, const MergedRow& row) {
    const Finished result = finished(p, head, row.stats.max, row.stats.sum);
    uint16_t* out = p.out + batch * p.out_stride_batch + head * p.out_stride_head +
                    static_cast<int64_t>(token) * p.out_stride_row;
#pragma unroll
    for (int j = 0; j < kVectorsOfLane; ++j) {
        if (column_of_lane(j) >= p.headdim_v) continue;
        const float* x = row.values[j];
        const float factor = result.factor;
        store_global_64(out + column_of_lane(j),
                        {Element::pack(x[0] * factor, x[1] * factor), Element::pack(x[2] * factor, x[3] * factor)});
    }
    if (p.lse != nullptr && lane_index() == 0)
        p.lse[batch * p.lse_stride_batch + head * p.lse_stride_head + token] = result.lse;
}

}  // namespace fastattention
