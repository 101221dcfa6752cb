// Tiles of prepare_keys.cuh, and the matrix products of their rows. Each token meets all earlier tokens of its chunk: those
// of its subchunk of 4 tokens apart from here, the others in parts of 4 tokens, then of 8, 16 and 32. In parts of each size,
// queries of every second part meet keys of the part before it.
//
//     tokens   0 1 2 3   4 5 6 7   8 ...      4: queries 4 to 7 with keys 0 to 3
//              ---4---   ---4---   ---        8: queries 8 to 15 with keys 0 to 7
//              --------8--------   ---       16: queries 16 to 31 with keys 0 to 15
//
// Each size has a tile, with a section for keys of the first parts, one for queries of the second parts and, with the delta
// rule, one for asking keys of the second parts.
#pragma once

#include "factors.cuh"
#include "shared_tile.cuh"

namespace fastattention {

constexpr int kSubchunk = 4;
constexpr int kSlice = Config::slice_columns;  // columns of queries and keys at a time
constexpr int kSizes = Config::num_sizes;      // of parts: kSubchunk << index
static_assert(kChunk == kSubchunk << kSizes && (kSizes == 3 || kSizes == 4), "parts of 16 or 32 tokens are the largest");

enum RowKind { kKeyRows, kQueryRows, kAskingRows };  // sections of a tile, in their order
constexpr int kSection = kChunk / 2;                 // rows: tokens of every second part
constexpr int kTileRows = (kDeltaRule ? 3 : 2) * kSection;
constexpr int kPitch = pitch_of<2>(kSlice);
constexpr int kSectionBytes = kSection * kPitch, kTileBytes = kTileRows * kPitch;

// Tokens of rows of a section, in parts of one size.
struct Parts {
    int tokens;  // of a part

    explicit FA_DEVICE Parts(int size) : tokens(kSubchunk << size) {}

    FA_DEVICE int of_row(int row) const { return row / tokens; }
    FA_DEVICE int key(int row) const { return row + of_row(row) * tokens; }
    FA_DEVICE int query(int row) const { return key(row) + tokens; }
};

// Matrix instructions take a step of rows: queries, asking keys or, on Volta, both. Steps end with the tile. Where there are
// fewer rows than a step has, it begins with keys, whose products are not used.
constexpr int kGroup = 16, kGroups = kSection / kGroup;  // rows of a section that meet: from 32 tokens
constexpr int kRowSteps = kTileRows - kSection < Arch::kStepRows ? 1 : (kTileRows - kSection) / Arch::kStepRows;
constexpr int kFirstRow = kTileRows - kRowSteps * Arch::kStepRows;
static_assert(kFirstRow >= 0 && (Arch::kStepRows == kGroup || kGroups == 1), "a step meets one group of keys");

// The products of a step of rows and a group of keys of a tile, which a warp computes for all slices.
struct Task {
    int size, step, keys;  // keys: index of the group

    FA_DEVICE int first_row() const { return kFirstRow + step * Arch::kStepRows; }
    FA_DEVICE int first_key() const { return keys * kGroup; }
};

// Tasks are dealt to warps in turns: those for parts of 4 or 8 tokens first, whose rows are stored first, then for 32 and 16.
constexpr int kInnerTasks = 2 * kRowSteps, kOfLargest = kSizes == 4 ? 2 * kRowSteps : 0;
constexpr int kTasks = kInnerTasks + kOfLargest + kRowSteps, kTurns = (kTasks + kWarps - 1) / kWarps;

FA_DEVICE Task task_at(int index) {
    if (index < kInnerTasks) return {index % 2, index / 2, index / 2 % kGroups};
    index -= kInnerTasks;
    if (index < kOfLargest) return {3, index / 2, index % 2};
    index -= kOfLargest;
    return {2, index, index % kGroups};
}

}  // namespace fastattention
