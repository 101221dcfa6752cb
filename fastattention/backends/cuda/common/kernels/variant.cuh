// What a kernel that multiplies tiles is compiled for, and the headers of architectures read. Python declares Config.
#pragma once

#include "element.cuh"

namespace fastattention {

constexpr int kHeaddim = Config::key_columns;     // of tiles of queries and keys; with kInt8Products two bytes each
constexpr int kHeaddimV = Config::value_columns;  // of tiles of values
constexpr int kTileM = Config::tile_m;            // query rows of a CTA; of a backward, queries or keys
constexpr int kTileN = Config::tile_n;            // keys of a tile; of a backward, the others of both
constexpr int kWarps = Config::num_warps;
constexpr int kStages = Config::num_stages;  // tiles of keys, and of values, that fit shared memory
// Queries and keys are bytes, with a scale for each row and for each group of keys (quantize_rows.cuh).
constexpr bool kInt8Products = Config::int8_products;
// Warps that work on the same rows: each scores a part of a tile's keys, all exchange their probabilities, and each
// accumulates a part of the columns of v (probability_exchange.cuh).
constexpr int kColumnWarps = Config::column_warps;
constexpr bool kValuesInKeys = Config::values_in_keys;  // v is the first columns of k, in the same memory
constexpr bool kQueriesInRegisters = Config::queries_in_registers;  // otherwise read from shared memory for every tile
constexpr bool kSwizzled = Config::swizzled;                        // how rows lie in shared memory, see shared_tile.cuh

constexpr int kThreads = kWarps * 32;
constexpr int kWarpKeys = kTileN / kColumnWarps;        // of a tile, that a warp scores
constexpr int kWarpColumns = kHeaddimV / kColumnWarps;  // of v, that it accumulates

// The 16-bit type that matrix products take; what is bfloat16 in memory becomes float16 on paths that lack it.
using Operand = ElementOf<Config::bfloat16_operands>::Type;

}  // namespace fastattention
