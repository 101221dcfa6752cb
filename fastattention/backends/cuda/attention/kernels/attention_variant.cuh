// What a kernel of attention is compiled for, besides its tiles. heuristics.py chooses the values.
#pragma once

#include "variant.cuh"

namespace fastattention {

// CTAs that share the columns of v, or of a gradient, where one has too few registers.
constexpr int kValueParts = Config::num_value_parts;
constexpr bool kModifiesScores = Config::modifies_scores;  // softcap, ALiBi or bias may be on
constexpr bool kDrops = Config::drops;
constexpr bool kPaged = Config::paged;
constexpr bool kBlockSparse = Config::block_sparse;  // there is a block mask
constexpr bool kMixesBlocks = Config::mixes_blocks;  // rows of a CTA lie in several of its rows; those of a warp never do
// Rows are those of all query heads that share a key head, token by token, rather than the tokens of one head.
constexpr bool kGroupedRows = Config::decodes;
// Every warp works on all rows, with keys of its own, rather than on rows of its own, with all keys.
constexpr bool kSplitKeysAcrossWarps = Config::split_keys_across_warps;

constexpr bool kLooksAhead = kPaged && kGroupedRows;  // for where the keys of the next tile lie, see shared_tile.cuh
constexpr int kKeyWarps = kSplitKeysAcrossWarps ? kWarps : 1;    // that share out the keys among themselves
constexpr int kRowWarps = kWarps / (kKeyWarps * kColumnWarps);   // likewise the rows
constexpr int kValueRow = kValuesInKeys ? kHeaddim : kHeaddimV;  // columns of a row of values in shared memory
static_assert(kWarps == kRowWarps * kKeyWarps * kColumnWarps, "every warp has its part");

}  // namespace fastattention
