// Merges the partial results of a decode, where its CTAs do not do so themselves: a CTA takes a row of a unit of a
// sequence, and its warps share out the partial results among themselves.
#pragma once

#include "partials.cuh"

namespace fastattention {

constexpr int kCombineWarps = 8;
constexpr int kCombineShared = kCombineWarps * (kColumnsOfRow + 4) * 4;  // a row, and its maximum and sum, of each warp

class CombineRow {
public:
    FA_DEVICE CombineRow(const AttentionParams& p, int batch, int unit, int row)
        : p_(p),
          schedule_(p),
          batch_(batch),
          unit_(unit),
          row_(row),
          groups_(schedule_.groups_of(schedule_.sequence(batch))) {}

    FA_DEVICE void run() const {
        const int kv_head = quotient(unit_, p_.num_m_tiles);
        const int group_row = (unit_ - kv_head * p_.num_m_tiles) * kTileM + row_, token = token_of(p_, group_row);
        // What lies in one stretch is finished, and the last tile of rows may not have this one.
        if (groups_.end - groups_.begin == 1 || token >= p_.seqlen_q) return;
        // What is read above was there before the decode.
        wait_for_previous_kernel();
        const int warp = warp_index();
        leave(warp, PartialRow{p_, schedule_, groups_, unit_, row_}.merged(groups_.begin + warp, kCombineWarps));
        block_barrier();
        if (warp != 0) return;
        MergedRow result = left_by_all();
        const int head = kv_head * p_.group_size + group_row - token * p_.group_size;
        write_row(p_, batch_, head, token, result);
    }

private:
    static FA_DEVICE uint32_t shared_of(int warp) { return shared_memory() + warp * (kColumnsOfRow + 4) * 4; }

    FA_DEVICE static void leave(int warp, const MergedRow& row) {
        const uint32_t to = shared_of(warp);
        if (lane_index() == 0) store_shared_128(to, {as_bits(row.stats.max), as_bits(row.stats.sum), 0, 0});
#pragma unroll
        for (int j = 0; j < kVectorsOfLane; ++j) {
            if (column_of_lane(j) >= kColumnsOfRow) continue;
            const float* x = row.values[j];
            store_shared_128(to + 16 + column_of_lane(j) * 4, {as_bits(x[0]), as_bits(x[1]), as_bits(x[2]), as_bits(x[3])});
        }
    }

    FA_DEVICE static MergedRow left_by_all() {
        RowStats parts[kCombineWarps];
        Words4 words[kCombineWarps][kVectorsOfLane];
#pragma unroll
        for (int warp = 0; warp < kCombineWarps; ++warp) {
            const Words4 stats = load_shared_128(shared_of(warp));
            parts[warp] = {as_float(stats.word[0]), as_float(stats.word[1])};
#pragma unroll
            for (int j = 0; j < kVectorsOfLane; ++j)
                words[warp][j] = column_of_lane(j) < kColumnsOfRow
                                     ? load_shared_128(shared_of(warp) + 16 + column_of_lane(j) * 4)
                                     : Words4{};
        }
        MergedRow row;
        row.add(parts, words);
        return row;
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
