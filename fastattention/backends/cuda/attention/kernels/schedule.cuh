// Stream-K schedule of a decode: how its CTAs divide the keys.
//
// The keys of every sequence are cut into tiles, and the tiles of all sequences are concatenated to one stream. CTA groups
// take equal spans of it: `num_cta_groups` in all, however uneven the lengths, which only the device knows. Within a group
// every CTA takes one unit, a tile of query rows of one key head, through the whole span: the heads of a token, which are
// often neighbours in memory, are read at about the same time.
//
// A span may end within a sequence, then begin the next, and so on. A sequence that lies in one span is finished
// there; of any other, every CTA stores a partial result, and combine.cuh merges them. A CTA has two slots for partial
// results: one for the sequence it begins within, one for the sequence it ends within.
//
// With `num_splits`, every sequence is cut into that many spans of its own instead, and a CTA has one slot. Tiles are then
// counted within their sequence, so that no CTA looks at other sequences: there may be one for every query of a prompt.
#pragma once

#include "lanes.cuh"
#include "work.cuh"

namespace fastattention {

constexpr int kStreamTile = kTileN * kKeyWarps;  // keys per tile of the stream

// Tiles from `begin` to before `end`.
struct TileSpan {
    int begin, end;
};

// Splits `length` tiles into `parts` spans, as evenly as possible, with the longer ones first. It computes in 32 bits, as a
// 64-bit division takes as long as a tile.
class EvenParts {
public:
    FA_DEVICE EvenParts(int length, int parts) : EvenParts(length, parts, quotient(length, parts)) {}
    // each: length / parts.
    FA_DEVICE EvenParts(int length, int parts, int each) : each_(each), longer_(length - each * parts) {}

    FA_DEVICE TileSpan part(int i) const { return {begin_of(i), begin_of(i + 1)}; }

    FA_DEVICE int part_with(int tile) const {
        const int in_longer = longer_ * (each_ + 1);
        return tile < in_longer ? quotient(tile, each_ + 1) : longer_ + quotient(tile - in_longer, each_);
    }

private:
    FA_DEVICE int begin_of(int i) const { return i * each_ + smaller(i, longer_); }

    int each_, longer_;
};

// The tiles of a sequence in the stream.
struct SequenceTiles {
    int batch, begin, end;
};

FA_DEVICE Divisor units_divisor(const AttentionParams& p) { return {p.num_units, p.units_multiplier, p.units_shift}; }

// Each lane reads the length of one of 32 sequences, starting at `first`. Lanes past the end read the last one.
FA_DEVICE CachedTokens cached_tokens_of_lane(const AttentionParams& p, int first) {
    return CachedTokens(p, smaller(first + lane_index(), p.batch_size - 1));
}

// Each warp computes the length of the stream, the sum of all sequences, for itself, one sequence per lane. For up to 32
// sequences the lanes also tell which sequence has a tile.
class Schedule {
public:
    // of_lane: the lengths of the first 32 sequences, one per lane.
    FA_DEVICE Schedule(const AttentionParams& p, const CachedTokens& of_lane)
        : p_(p),
          end_of_lane_(ends_from(0, 0, of_lane)),
          total_(p.num_splits > 0    ? 0
                 : p.batch_size > 32 ? sum_of_tiles(p.batch_size)
                                     : shuffle(end_of_lane_, 31)),
          cta_groups_(p.num_splits > 0 ? p.batch_size * p.num_splits : smaller(p.num_cta_groups, total_)),
          spans_(total_, cta_groups_, cta_groups_ < p.num_cta_groups ? 1 : cta_groups_divisor().quotient_of(total_)) {}

    // CTA groups with work to do; with num_splits, an upper bound.
    FA_DEVICE int num_cta_groups() const { return cta_groups_; }

    FA_DEVICE TileSpan span(int cta_group) const {
        if (p_.num_splits == 0) return spans_.part(cta_group);
        const SequenceTiles whole = sequence(cta_group / p_.num_splits);
        const int split = cta_group - whole.batch * p_.num_splits, tiles = whole.end - whole.begin;
        const int splits = smaller(p_.num_splits, tiles);
        return split < splits ? EvenParts(tiles, splits).part(split) : TileSpan{0, 0};
    }

    // The CTA groups whose spans have tiles of a sequence.
    FA_DEVICE TileSpan cta_groups_of(const SequenceTiles& sequence) const {
        if (p_.num_splits > 0) {
            const int first = sequence.batch * p_.num_splits;
            return {first, first + smaller(p_.num_splits, sequence.end - sequence.begin)};
        }
        return {spans_.part_with(sequence.begin), spans_.part_with(sequence.end - 1) + 1};
    }

    // The slot for the partial result of a group's CTA for a unit. begins: whether it has the first tile of the sequence.
    FA_DEVICE int slot(int cta_group, bool begins, int unit) const {
        return (p_.num_splits > 0 ? cta_group : 2 * cta_group + begins) * p_.num_units + unit;
    }

    FA_DEVICE SequenceTiles sequence(int batch) const {
        if (p_.num_splits > 0) return {batch, 0, tiles_of(batch)};
        const int begin = batch > 32 ? sum_of_tiles(batch) : batch == 0 ? 0 : shuffle(end_of_lane_, batch - 1);
        return {batch, begin, begin + tiles_of(batch)};
    }

    // The sequence that has a tile of a CTA group.
    FA_DEVICE SequenceTiles sequence_with(int tile, int cta_group) const {
        if (p_.num_splits > 0) return sequence(cta_group / p_.num_splits);
        int first = 0, begin = 0, end_of_lane = end_of_lane_;
#pragma unroll 1
        for (; first + 32 < p_.batch_size && shuffle(end_of_lane, 31) <= tile; first += 32) {
            begin = shuffle(end_of_lane, 31);
            end_of_lane = ends_from(first + 32, begin, cached_tokens_of_lane(p_, first + 32));
        }
        const int lane = count_lanes(end_of_lane <= tile);
        return {first + lane, lane == 0 ? begin : shuffle(end_of_lane, lane - 1), shuffle(end_of_lane, lane)};
    }

    FA_DEVICE SequenceTiles next(const SequenceTiles& sequence) const {
        return {sequence.batch + 1, sequence.end, sequence.end + tiles_of(sequence.batch + 1)};
    }

    // The first key of the first tile of a sequence.
    FA_DEVICE static int first_key(const BasicTileRange<int>& mask) { return mask.row_begin(0) / kTileN * kTileN; }

private:
    FA_DEVICE Divisor cta_groups_divisor() const {
        return {p_.num_cta_groups, p_.cta_groups_multiplier, p_.cta_groups_shift};
    }

    FA_DEVICE int tiles_of(int batch) const { return tiles_of(CachedTokens(p_, batch)); }

    // A sequence without keys has a tile too, so that a CTA writes its results.
    FA_DEVICE int tiles_of(const CachedTokens& before) const {
        const BasicTileRange<int> mask = mask_of_cache(p_, before);
        const int keys = mask.row_end(mask.seqlen_q - 1) - first_key(mask);
        return keys <= 0 ? 1 : (keys + kStreamTile - 1) / kStreamTile;
    }

    // The end of one sequence per lane, starting with sequence `first`, which begins at `begin`.
    FA_DEVICE int ends_from(int first, int begin, const CachedTokens& of_lane) const {
        const int tiles = tiles_of(of_lane);
        if (p_.batch_size == 1) return tiles;
        return begin + sum_up_to_lane(first + lane_index() < p_.batch_size ? tiles : 0);
    }

    // The tiles of all sequences before `batch`. All lanes of a warp call this together.
    FA_DEVICE int sum_of_tiles(int batch) const {
        int sum = 0;
#pragma unroll 1
        for (int mine = lane_index(); mine < batch; mine += 32) sum += tiles_of(mine);
        return sum_of_lanes(sum);
    }

    const AttentionParams& p_;
    const int end_of_lane_;  // ends of the first 32 sequences, one per lane
    const int total_, cta_groups_;
    const EvenParts spans_;
};

}  // namespace fastattention
