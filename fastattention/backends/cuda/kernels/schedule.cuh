// How the CTAs of a decode share out the keys among themselves.
//
// A unit is a tile of query rows of one key head of one sequence; its keys are cut into tiles. The tiles of all units stand in
// one line, the units of a sequence one after the other, and every CTA takes an equal stretch of it: `num_ctas` stretches in
// all, however uneven the lengths, which only the device knows. A stretch may end within a unit, then begin the next, and so
// on. A unit that lies in one stretch is finished by that CTA; of any other every CTA leaves a partial result, and
// combine.cuh merges them. A CTA has two slots for partial results: one for the unit it begins within, one for the unit it
// ends within.
//
// With `num_splits`, every unit is cut into so many stretches of its own instead, and a CTA has one slot.
#pragma once

#include "work.cuh"

namespace fastattention {

constexpr int kUnitTile = kTileN * kKeyWarps;  // keys of a tile of the line

FA_DEVICE int64_t smaller_of(int64_t a, int64_t b) { return a < b ? a : b; }

FA_DEVICE uint32_t sum_of_lanes(uint32_t x) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) x += shuffle_xor(x, distance);
    return x;
}

FA_DEVICE uint32_t sum_of_lanes_before(uint32_t x) {
    uint32_t sum = x;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const uint32_t before = shuffle(sum, lane_index() - distance);
        if (lane_index() >= distance) sum += before;
    }
    return sum - x;
}

// A number of tiles on the line, and those of one of its units.
struct Stretch {
    int64_t begin, end;
};

// A sequence on the line: its units have `tiles` tiles each, from `begin` on.
struct SequenceTiles {
    int batch, tiles;
    int64_t begin;
};

class Schedule {
public:
    FA_DEVICE explicit Schedule(const AttentionParams& p)
        : p_(p), units_(static_cast<int64_t>(p.nheads / p.group_size) * p.num_m_tiles), total_(end_of(p.batch_size)) {}

    // Units of a sequence.
    FA_DEVICE int64_t units() const { return units_; }

    // CTAs that have something to do.
    FA_DEVICE int64_t num_ctas() const {
        return p_.num_splits > 0 ? p_.batch_size * units_ * p_.num_splits : smaller_of(p_.num_ctas, total_);
    }

    FA_DEVICE Stretch stretch(int64_t cta) const {
        if (p_.num_splits == 0) {
            const int64_t ctas = num_ctas();
            return {total_ * cta / ctas, total_ * (cta + 1) / ctas};
        }
        const int64_t unit = cta / p_.num_splits;
        const int split = static_cast<int>(cta % p_.num_splits), batch = static_cast<int>(unit / units_);
        const int tiles = tiles_of(batch);
        const int64_t splits = smaller_of(p_.num_splits, tiles), begin = end_of(batch) + unit % units_ * tiles;
        if (split >= splits) return {begin, begin};
        return {begin + tiles * split / splits, begin + tiles * (split + 1) / splits};
    }

    // The first and the last CTA whose stretch has tiles of a unit.
    FA_DEVICE Stretch ctas_of(const SequenceTiles& sequence, int64_t unit) const {
        if (p_.num_splits > 0) {
            const int64_t first = (sequence.batch * units_ + unit) * p_.num_splits;
            return {first, first + smaller_of(p_.num_splits, sequence.tiles) - 1};
        }
        const int64_t first = sequence.begin + unit * sequence.tiles;
        return {cta_of(first), cta_of(first + sequence.tiles - 1)};
    }

    // Where a CTA leaves its part of a unit. begins: whether the first tile of the unit is in it.
    FA_DEVICE int64_t slot(int64_t cta, bool begins) const { return p_.num_splits > 0 ? cta : 2 * cta + begins; }

    FA_DEVICE SequenceTiles sequence(int batch) const { return {batch, tiles_of(batch), end_of(batch)}; }

    // The sequence that has a tile: 32 sequences at a time, one a lane.
    FA_DEVICE SequenceTiles sequence_with(int64_t tile) const {
        for (int64_t begin = 0, first = 0;; first += 32) {
            const int mine = static_cast<int>(first) + lane_index();
            const uint32_t tiles = mine < p_.batch_size ? tiles_of(mine) : 0, sum = sum_of_lanes_before(tiles) + tiles;
            const int64_t end = begin + units_ * shuffle(sum, 31);
            if (tile >= end && first + 32 < p_.batch_size) {
                begin = end;
                continue;
            }
            const int lane = static_cast<int>(sum_of_lanes(begin + units_ * sum <= tile ? 1 : 0));
            const uint32_t found = shuffle(tiles, lane);
            return {static_cast<int>(first) + lane, static_cast<int>(found), begin + units_ * (shuffle(sum, lane) - found)};
        }
    }

    FA_DEVICE SequenceTiles next(const SequenceTiles& sequence) const {
        return {sequence.batch + 1, tiles_of(sequence.batch + 1), sequence.begin + units_ * sequence.tiles};
    }

    // Where the first tile of a unit begins.
    FA_DEVICE static int first_key(const BasicTileRange<int>& mask) { return mask.row_begin(0) / kTileN * kTileN; }

private:
    // A sequence without keys has a tile too, so that someone writes its results.
    FA_DEVICE int tiles_of(int batch) const {
        if (p_.seqlen_q == 0) return 1;
        const BasicTileRange<int> mask = mask_of(p_, batch);
        const int keys = mask.row_end(mask.seqlen_q - 1) - first_key(mask);
        return keys <= 0 ? 1 : (keys + kUnitTile - 1) / kUnitTile;
    }

    // Where the sequences before `batch` end.
    FA_DEVICE int64_t end_of(int batch) const {
        int64_t sum = 0;
        for (int first = 0; first < batch; first += 32) {
            const int mine = first + lane_index();
            sum += sum_of_lanes(mine < batch ? tiles_of(mine) : 0);
        }
        return sum * units_;
    }

    FA_DEVICE int64_t cta_of(int64_t tile) const { return ((tile + 1) * num_ctas() - 1) / total_; }

    const AttentionParams& p_;
    const int64_t units_;
    const int64_t total_;
};

}  // namespace fastattention
