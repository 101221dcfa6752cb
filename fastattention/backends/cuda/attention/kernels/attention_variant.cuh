// Compile-time options of an attention kernel, besides its tile sizes. heuristics.py chooses the values.
#pragma once

#include "variant.cuh"

namespace fastattention {

// CTAs that divide the columns of v, or of a gradient, among themselves where one CTA has too few registers.
constexpr int kValueParts = Config::num_value_parts;
constexpr bool kModifiesScores = Config::modifies_scores;  // scores are more than products times a number
constexpr bool kStagesBias = Config::stages_bias;  // tiles of biases pass through shared memory, where they lie well
constexpr bool kDrops = Config::drops;
constexpr bool kPaged = Config::paged;
constexpr bool kBlockSparse = Config::block_sparse;  // the call has a block mask
constexpr bool kMixesBlocks = Config::mixes_blocks;  // a CTA's rows lie in several rows of blocks; a warp's rows never do
// Rows are the tokens of all query heads that share a key head, token by token, instead of the tokens of one head.
constexpr bool kGroupedRows = Config::decodes;
// Each warp processes all rows with its own keys, instead of its own rows with all keys.
constexpr bool kSplitKeysAcrossWarps = Config::split_keys_across_warps;

constexpr bool kLooksAhead = kPaged && kGroupedRows;  // looks up pages one tile ahead, see shared_tile.cuh
constexpr int kKeyWarps = kSplitKeysAcrossWarps ? kWarps : 1;    // warps that divide the keys among themselves
constexpr int kRowWarps = kWarps / (kKeyWarps * kColumnWarps);   // warps that divide the rows among themselves
constexpr int kValueRow = kValuesInKeys ? kHeaddim : kHeaddimV;  // columns of a row of values in shared memory
static_assert(kWarps == kRowWarps * kKeyWarps * kColumnWarps, "every warp has its part");

}  // namespace fastattention
