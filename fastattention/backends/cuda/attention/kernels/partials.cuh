// Partial results of a decode: where each CTA stores them, and how they are merged exactly. The partial result of a row is a
// maximum, a sum and an unnormalized result.
#pragma once

#include "results.cuh"
#include "schedule.cuh"

namespace fastattention {

// Half a warp merges a row, so that each instruction serves two rows. A merge waits for memory once, and its instructions
// take about as long as that.
constexpr int kLanesOfRow = 16;
constexpr int kRowsOfWarp = 32 / kLanesOfRow;
constexpr int kColumnsOfRow = kHeaddimV * kValueParts;
constexpr int kVectorsOfLane = (kColumnsOfRow + 63) / 64;  // four columns each: lane l has columns 4 l, 4 l + 64, ...
constexpr int kPartsTogether = kVectorsOfLane <= 2 ? kLanesOfRow : 32 / kVectorsOfLane;  // as registers allow

FA_DEVICE int lane_of_row() { return lane_index() % kLanesOfRow; }
FA_DEVICE int half_of_warp() { return lane_index() / kLanesOfRow; }
FA_DEVICE int column_of_lane(int vector) { return vector * 64 + lane_of_row() * 4; }

// The merged result of a row so far, spread over half a warp.
struct MergedRow {
    RowStats stats{-infinity(), 0.0f};
    float values[kVectorsOfLane][4] = {};

    // Adds kCount partial results; lane k has the maximum and the sum of the k-th.
    template <int kCount>
    FA_DEVICE void add(const RowStats& of_lane, const Words4 (&words)[kCount][kVectorsOfLane]) {
        static_assert(kCount <= kLanesOfRow, "a lane has those of one at most");
        const float highest = larger(maximum_of_lanes<kLanesOfRow>(of_lane.max), stats.max);
        rescale(highest);
        const float weight_of_lane = rescaling(of_lane.max, highest);
        stats.sum += sum_of_lanes<kLanesOfRow>(weight_of_lane * of_lane.sum);
#pragma unroll
        for (int k = 0; k < kCount; ++k) {
            const float weight = shuffle(weight_of_lane, half_of_warp() * kLanesOfRow + k);
#pragma unroll
            for (int j = 0; j < kVectorsOfLane; ++j)
#pragma unroll
                for (int i = 0; i < 4; ++i) values[j][i] += weight * as_float(words[k][j].word[i]);
        }
    }

private:
    FA_DEVICE void rescale(float highest) {
        const float factor = rescaling(stats.max, highest);
        stats = {highest, stats.sum * factor};
#pragma unroll
        for (int j = 0; j < kVectorsOfLane; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) values[j][i] *= factor;
    }
};

// The partial results of one row of a unit, one from each of `cta_groups`.
class PartialRow {
public:
    // exists: whether the row exists; if not, nothing is read.
    FA_DEVICE PartialRow(const AttentionParams& p, const Schedule& schedule, TileSpan cta_groups, int unit, int row,
                         bool exists)
        : p_(p), num_parts_(cta_groups.end - cta_groups.begin) {
        first_ = at(schedule.slot(cta_groups.begin, true, unit), row);
        other_ = at(schedule.slot(cta_groups.begin, false, unit), row);
        step_ = (schedule.slot(1, false, unit) - schedule.slot(0, false, unit)) * p.partial_rows;
        parts_of_row_ = exists ? num_parts_ : 0;
#pragma unroll
        for (int j = 0; j < kVectorsOfLane; ++j) parts_[j] = exists && column_of_lane(j) < p.headdim_v ? num_parts_ : 0;
    }

    // Merges every `share`-th part, starting at `index`, kTogether at once. Both halves of a warp pass the same groups.
    template <int kTogether>
    FA_DEVICE MergedRow merged(int index, int share) const {
        MergedRow result;
#pragma unroll 1
        for (int first = index; first - index < num_parts_; first += kTogether * share) {
            const bool has = lane_of_row() < kTogether;
            const RowStats of_lane = has ? read_stats(first + lane_of_row() * share) : RowStats{-infinity(), 0.0f};
            Words4 words[kTogether][kVectorsOfLane];
            const float* from = p_.partial_out + row_of(first) * p_.headdim_v + column_of_lane(0);
            read(first, from, words[0]);
            from = p_.partial_out + row_if_not_first(first) * p_.headdim_v + column_of_lane(0);
            const int64_t step = static_cast<int64_t>(step_) * share * p_.headdim_v;
#pragma unroll
            for (int k = 1; k < kTogether; ++k) read(first + k * share, from += step, words[k]);
            result.add(of_lane, words);
        }
        return result;
    }

private:
    FA_DEVICE int64_t at(int slot, int row) const { return static_cast<int64_t>(slot) * p_.partial_rows + row; }

    // The span of the first group may begin with the sequence; the spans of the others begin within it.
    FA_DEVICE int64_t row_of(int part) const { return part == 0 ? first_ : row_if_not_first(part); }
    FA_DEVICE int64_t row_if_not_first(int part) const { return other_ + static_cast<int64_t>(part) * step_; }

    FA_DEVICE RowStats read_stats(int part) const {
        if (part >= parts_of_row_) return {-infinity(), 0.0f};
        const Words2 words = load_written_64(p_.partial_stats + 2 * row_of(part));
        return {as_float(words.word[0]), as_float(words.word[1])};
    }

    FA_DEVICE void read(int part, const float* from, Words4 (&words)[kVectorsOfLane]) const {
#pragma unroll
        for (int j = 0; j < kVectorsOfLane; ++j) words[j] = load_written_128(from + j * 64, part < parts_[j]);
    }

    const AttentionParams& p_;
    const int num_parts_;
    int64_t first_, other_;  // where the first group's part lies, and where it would if that group were not the first
    int step_;               // distance of two groups' parts, in rows
    int parts_of_row_;       // 0 if the row does not exist
    int parts_[kVectorsOfLane];  // 0 if the columns do not exist either
};

// Writes out and lse of a row.
FA_DEVICE void write_row(const AttentionParams& p, int batch, int head, int token, const MergedRow& row) {
    const Finished result = finished(p, head, row.stats.max, row.stats.sum);
    uint16_t* out =
        p.out + batch * p.out_stride_batch + head * p.out_stride_head + static_cast<int64_t>(token) * p.out_stride_row;
#pragma unroll
    for (int j = 0; j < kVectorsOfLane; ++j) {
        if (column_of_lane(j) >= p.headdim_v) continue;
        const float* x = row.values[j];
        const float factor = result.factor;
        store_global_64(out + column_of_lane(j),
                        {Element::pack(x[0] * factor, x[1] * factor), Element::pack(x[2] * factor, x[3] * factor)});
    }
    if (p.lse != nullptr && lane_of_row() == 0)
        p.lse[batch * p.lse_stride_batch + head * p.lse_stride_head + token] = result.lse;
}

}  // namespace fastattention
