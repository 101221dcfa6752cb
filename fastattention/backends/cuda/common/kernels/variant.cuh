// Compile-time options of a kernel that multiplies tiles, for it and for headers of architectures. Python declares Config.
#pragma once

#include "element.cuh"

namespace fastattention {

constexpr int kHeaddim = Config::key_columns;     // columns of tiles of queries and keys; with int8, two bytes each
constexpr int kHeaddimV = Config::value_columns;  // columns of tiles of values
constexpr int kTileM = Config::tile_m;            // query rows of a CTA; in a backward, queries or keys
constexpr int kTileN = Config::tile_n;            // keys of a tile; in a backward, keys or queries
constexpr int kWarps = Config::num_warps;
constexpr int kStages = Config::num_stages;  // tiles of keys, and of values, that fit shared memory
// Queries and keys are bytes, with a scale for each row and for each group of keys (quantize_rows.cuh).
constexpr bool kInt8Products = Config::int8_products;
// Warps that work on the same rows: each scores a part of a tile's keys, all exchange their probabilities, and each
// accumulates a part of the columns of v (probability_exchange.cuh).
constexpr int kColumnWarps = Config::column_warps;
constexpr bool kValuesInKeys = Config::values_in_keys;  // v is the first columns of k, in the same memory
constexpr bool kQueriesInRegisters = Config::queries_in_registers;  // otherwise read from shared memory for every tile
constexpr bool kSwizzled = Config::swizzled;                        // layout of rows in shared memory, see shared_tile.cuh

constexpr int kThreads = kWarps * 32;
constexpr int kWarpKeys = kTileN / kColumnWarps;        // keys of a tile that a warp scores
constexpr int kWarpColumns = kHeaddimV / kColumnWarps;  // columns of v that a warp accumulates

// The 16-bit type of operands. On architectures without bfloat16 instructions, bfloat16 in memory becomes float16.
using Operand = ElementOf<Config::bfloat16_operands>::Type;

}  // namespace fastattention
