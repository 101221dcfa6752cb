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

#include "lanes.cuh"
#include "work.cuh"

namespace fastattention {

constexpr int kUnitTile = kTileN * kKeyWarps;  // keys of a tile of the line

// From `begin` to before `end`: tiles on the line.
struct Stretch {
    int begin, end;
};

// `parts` stretches of `length` tiles, as even as can be: the longer ones come first. In 32 bits: a division in 64 takes as
// long as a tile.
class EvenParts {
public:
    FA_DEVICE EvenParts(int length, int parts) : each_(length / parts), longer_(length - each_ * parts) {}

    FA_DEVICE Stretch part(int i) const { return {begin_of(i), begin_of(i + 1)}; }

    FA_DEVICE int part_with(int tile) const {
        const int in_longer = longer_ * (each_ + 1);
        return tile < in_longer ? tile / (each_ + 1) : longer_ + (tile - in_longer) / each_;
    }

private:
    FA_DEVICE int begin_of(int i) const { return i * each_ + smaller(i, longer_); }

    int each_, longer_;
};

// A sequence on the line: its units have `tiles` tiles each, from `begin` on.
struct SequenceTiles {
    int batch, tiles, begin;
};

class Schedule {
public:
    FA_DEVICE explicit Schedule(const AttentionParams& p)
        : p_(p),
          units_(p.nheads / p.group_size * p.num_m_tiles),
          total_(end_of(p.batch_size)),
          ctas_(p.num_splits > 0 ? p.batch_size * units_ * p.num_splits : smaller(p.num_ctas, total_)),
          stretches_(total_, ctas_) {}

    // Units of a sequence.
    FA_DEVICE int units() const { return units_; }

    // CTAs that have something to do, with num_splits at most.
    FA_DEVICE int num_ctas() const { return ctas_; }

    FA_DEVICE Stretch stretch(int cta) const {
        if (p_.num_splits == 0) return stretches_.part(cta);
        const int unit = cta / p_.num_splits, split = cta - unit * p_.num_splits, batch = unit / units_;
        const int tiles = tiles_of(batch), begin = end_of(batch) + (unit - batch * units_) * tiles;
        const int splits = smaller(p_.num_splits, tiles);
        if (split >= splits) return {begin, begin};
        const Stretch part = EvenParts(tiles, splits).part(split);
        return {begin + part.begin, begin + part.end};
    }

    // The first CTA whose stretch has tiles of a unit, and one past the last.
    FA_DEVICE Stretch ctas_of(const SequenceTiles& sequence, int unit) const {
        if (p_.num_splits > 0) {
            const int first = (sequence.batch * units_ + unit) * p_.num_splits;
            return {first, first + smaller(p_.num_splits, sequence.tiles)};
        }
        const int first = sequence.begin + unit * sequence.tiles;
        return {stretches_.part_with(first), stretches_.part_with(first + sequence.tiles - 1) + 1};
    }

    // Where a CTA leaves its part of a unit. begins: whether the first tile of the unit is in it.
    FA_DEVICE int slot(int cta, bool begins) const { return p_.num_splits > 0 ? cta : 2 * cta + begins; }

    FA_DEVICE SequenceTiles sequence(int batch) const { return {batch, tiles_of(batch), end_of(batch)}; }

    // The sequence that has a tile: 32 sequences at a time, one a lane.
    FA_DEVICE SequenceTiles sequence_with(int tile) const {
        for (int begin = 0, first = 0;; first += 32) {
            const int mine = first + lane_index();
            const uint32_t tiles = mine < p_.batch_size ? tiles_of(mine) : 0, sum = sum_of_lanes_before(tiles) + tiles;
            const int end = begin + units_ * static_cast<int>(shuffle(sum, 31));
            if (tile >= end && first + 32 < p_.batch_size) {
                begin = end;
                continue;
            }
            const bool is_before = begin + units_ * static_cast<int>(sum) <= tile;
            const int lane = static_cast<int>(sum_of_lanes(is_before ? 1u : 0u));
            const int found = static_cast<int>(shuffle(tiles, lane));
            return {first + lane, found, begin + units_ * (static_cast<int>(shuffle(sum, lane)) - found)};
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
        const BasicTileRange<int> mask = mask_of(p_, batch);
        const int keys = mask.row_end(mask.seqlen_q - 1) - first_key(mask);
        return keys <= 0 ? 1 : (keys + kUnitTile - 1) / kUnitTile;
    }

    // Where the sequences before `batch` end; all lanes ask together.
    FA_DEVICE int end_of(int batch) const {
        uint32_t sum = 0;
        for (int first = 0; first < batch; first += 32) {
            const int mine = first + lane_index();
            sum += mine < batch ? tiles_of(mine) : 0;
        }
        return static_cast<int>(sum_of_lanes(sum)) * units_;
    }

    const AttentionParams& p_;
    const int units_, total_, ctas_;
    const EvenParts stretches_;
};

}  // namespace fastattention
