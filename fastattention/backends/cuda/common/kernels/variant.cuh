// What one variant of the kernel is compiled for. heuristics.py chooses the values; KernelConfig.macros names them.
#pragma once

#include "element.cuh"

namespace fastattention {

constexpr int kHeaddim = FA_HEADDIM;     // the call's headdim, rounded up; with kInt8Products half of it, two bytes each
constexpr int kHeaddimV = FA_HEADDIM_V;  // likewise, or a part of it:
constexpr int kValueParts =
    FA_VALUE_PARTS;  // CTAs that share the columns of v, or of a gradient, where one has too few registers
constexpr int kTileM = FA_TILE_M;        // query rows of a CTA; of a backward, queries or keys
constexpr int kTileN = FA_TILE_N;        // keys of a tile; of a backward, the others of both
constexpr int kWarps = FA_WARPS;
constexpr int kStages = FA_STAGES;              // tiles of keys, and of values, that fit shared memory
constexpr bool kModifiesScores = FA_MODIFIES;   // softcap, ALiBi or bias may be on
constexpr bool kDrops = FA_DROPS;
constexpr bool kPaged = FA_PAGED;
// Queries and keys are bytes, with a scale for each row and for each group of keys (quantize_rows.cuh).
constexpr bool kInt8Products = FA_INT8_PRODUCTS;
constexpr bool kBlockSparse = FA_BLOCK_SPARSE;  // there is a block mask
constexpr bool kMixesBlocks = FA_MIXES_BLOCKS;  // rows of a CTA lie in several of its rows; those of a warp never do
// Rows are those of all query heads that share a key head, token by token, rather than the tokens of one head.
constexpr bool kGroupedRows = FA_GROUPED_ROWS;
// Every warp works on all rows, with keys of its own, rather than on rows of its own, with all keys.
constexpr bool kSplitKeysAcrossWarps = FA_SPLIT_KEYS_ACROSS_WARPS;
// Warps that work on the same rows: each scores a part of a tile's keys, all exchange their probabilities, and each
// accumulates a part of the columns of v (probability_exchange.cuh).
constexpr int kColumnWarps = FA_COLUMN_WARPS;
constexpr bool kValuesInKeys = FA_VALUES_IN_KEYS;  // v is the first columns of k, in the same memory
constexpr bool kQueriesInRegisters = FA_QUERIES_IN_REGISTERS;  // otherwise read from shared memory for every tile

constexpr bool kLooksAhead = kPaged && kGroupedRows;  // for where the keys of the next tile lie, see shared_tile.cuh
constexpr bool kSwizzled = FA_SWIZZLED;  // how rows lie in shared memory, see shared_tile.cuh

constexpr int kThreads = kWarps * 32;
constexpr int kKeyWarps = kSplitKeysAcrossWarps ? kWarps : 1;       // that share out the keys among themselves
constexpr int kRowWarps = kWarps / (kKeyWarps * kColumnWarps);      // likewise the rows
constexpr int kWarpKeys = kTileN / kColumnWarps;                    // of a tile, that a warp scores
constexpr int kWarpColumns = kHeaddimV / kColumnWarps;              // of v, that it accumulates
constexpr int kValueRow = kValuesInKeys ? kHeaddim : kHeaddimV;     // columns of a row of values in shared memory
static_assert(kWarps == kRowWarps * kKeyWarps * kColumnWarps, "every warp has its part");

// The 16-bit type that matrix products take; what is bfloat16 in memory becomes float16 on paths that lack it.
#if FA_BFLOAT16_OPERANDS
using Operand = Bfloat16;
#else
using Operand = Float16;
#endif

}  // namespace fastattention
