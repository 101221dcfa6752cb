// Merges the partial results of a split-KV decode whose CTAs do not merge them themselves. A CTA merges some rows of a unit
// of a sequence. Teams of half a warp each divide the partial results of a row among themselves.
#pragma once

#include "partials.cuh"

namespace fastattention {

constexpr int kCombineWarps = Config::combine_warps;
constexpr int kCombineTeams = kCombineWarps * kRowsOfWarp;
constexpr int kCombineTogether = 4;  // parts that a team reads at once: more would take registers that other CTAs need
constexpr int kCombineShared = kCombineTeams * (kColumnsOfRow + 4) * 4;  // per team a row, its maximum and its sum
static_assert(kCombineShared == Config::combine_bytes, "attention/config.py counts shared memory otherwise");

class CombineRows {
public:
    // first_row: the first row of this CTA among the rows of the unit.
    FA_DEVICE CombineRows(const AttentionParams& p, int batch, int unit, int first_row)
        : p_(p),
          schedule_(p, cached_tokens_of_lane(p, 0)),
          batch_(batch),
          unit_(unit),
          team_(warp_index() * kRowsOfWarp + half_of_warp()),
          index_(team_ % p.teams_of_row),
          row_(first_row + team_ / p.teams_of_row),
          cta_groups_(schedule_.cta_groups_of(schedule_.sequence(batch))) {}

    FA_DEVICE void run() const {
        // A sequence that lies in one span has its final result already.
        if (cta_groups_.end - cta_groups_.begin == 1) return;
        const int kv_head = quotient(unit_, p_.num_m_tiles);
        const int group_row = (unit_ - kv_head * p_.num_m_tiles) * kTileM + row_, token = token_of(p_, group_row);
        // The last tile of rows may be shorter.
        const bool exists = row_ < p_.partial_rows && group_row < grouped_rows(p_);
        // Everything read above was written before the decode began.
        wait_for_previous_kernel();
        const PartialRow row(p_, schedule_, cta_groups_, unit_, row_, exists);
        MergedRow result = row.merged<kCombineTogether>(index_, p_.teams_of_row);
        if (p_.teams_of_row > 1) {
            leave(team_, result);
            cta_barrier();
            const int first_of_warp = team_ - half_of_warp();
            if (first_of_warp % p_.teams_of_row != 0) return;
            result = left_by_all();
        }
        const int head = kv_head * p_.group_size + group_row - token * p_.group_size;
        if (exists && index_ == 0) write_row(p_, batch_, head, token, result);
    }

private:
    static FA_DEVICE uint32_t shared_of(int team) { return shared_memory() + team * (kColumnsOfRow + 4) * 4; }

    FA_DEVICE static void leave(int team, const MergedRow& row) {
        const uint32_t to = shared_of(team);
        if (lane_of_row() == 0) store_shared_128(to, {as_bits(row.stats.max), as_bits(row.stats.sum), 0, 0});
#pragma unroll
        for (int j = 0; j < kVectorsOfLane; ++j) {
            if (column_of_lane(j) >= kColumnsOfRow) continue;
            const float* x = row.values[j];
            store_shared_128(to + 16 + column_of_lane(j) * 4, {as_bits(x[0]), as_bits(x[1]), as_bits(x[2]), as_bits(x[3])});
        }
    }

    // Merges what all teams of this team's row have stored.
    FA_DEVICE MergedRow left_by_all() const {
        MergedRow row;
#pragma unroll 1
        for (int done = 0; done < p_.teams_of_row; done += kCombineTogether) {
            const int first = team_ - index_ + done;
            RowStats of_lane{-infinity(), 0.0f};
            if (lane_of_row() < kCombineTogether) {
                const Words4 stats = load_shared_128(shared_of(first + lane_of_row()));
                of_lane = {as_float(stats.word[0]), as_float(stats.word[1])};
            }
            Words4 words[kCombineTogether][kVectorsOfLane];
#pragma unroll
            for (int team = 0; team < kCombineTogether; ++team)
#pragma unroll
                for (int j = 0; j < kVectorsOfLane; ++j)
                    words[team][j] = column_of_lane(j) < kColumnsOfRow
                                         ? load_shared_128(shared_of(first + team) + 16 + column_of_lane(j) * 4)
                                         : Words4{};
            row.add(of_lane, words);
        }
        return row;
    }

    const AttentionParams& p_;
    const Schedule schedule_;
    const int batch_, unit_;
    const int team_, index_;  // among all teams, and among the teams of its row
    const int row_;
    const TileSpan cta_groups_;  // groups that have parts of the sequence
};

}  // namespace fastattention

extern "C" FA_KERNEL void FA_LAUNCH_BOUNDS(fastattention::kCombineWarps * 32, 1)
    fastattention_combine(FA_PARAMETER fastattention::AttentionParams params) {
    using namespace fastattention;
    const int rows_of_cta = kCombineTeams / params.teams_of_row;
    const int ctas_of_unit = (params.partial_rows + rows_of_cta - 1) / rows_of_cta;
    const int cta = static_cast<int>(cta_index()), place = quotient(cta, ctas_of_unit);
    const int batch = units_divisor(params).quotient_of(place);
    CombineRows(params, batch, place - batch * params.num_units, (cta - place * ctas_of_unit) * rows_of_cta).run();
}
