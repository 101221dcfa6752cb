// What one variant of the kernel is compiled for. heuristics.py chooses the values; KernelConfig.macros names them.
#pragma once

#include "intrinsics.cuh"

namespace fastattention {

constexpr int kHeaddim = FA_HEADDIM;     // the call's headdim, rounded up
constexpr int kHeaddimV = FA_HEADDIM_V;  // likewise, or a part of it:
constexpr int kValueParts = FA_VALUE_PARTS;  // CTAs that share the columns of v, where one has too few registers for all
constexpr int kTileM = FA_TILE_M;        // query rows of a CTA
constexpr int kTileN = FA_TILE_N;        // keys of a tile
constexpr int kWarps = FA_WARPS;
constexpr int kStages = FA_STAGES;              // tiles of keys, and of values, that fit shared memory
constexpr bool kModifiesScores = FA_MODIFIES;   // softcap, ALiBi or bias may be on
constexpr bool kPaged = FA_PAGED;
constexpr bool kQueriesInRegisters = FA_QUERIES_IN_REGISTERS;  // otherwise read from shared memory for every tile

constexpr int kThreads = kWarps * 32;

// The 16-bit type of q, k, v and out.
struct Float16 {
    static FA_DEVICE uint32_t pack(float low, float high) { return pack_float16(low, high); }
    static FA_DEVICE float widen(uint16_t bits) { return float16_to_float(bits); }
};

struct Bfloat16 {
    static FA_DEVICE uint32_t pack(float low, float high) { return pack_bfloat16(low, high); }
    static FA_DEVICE float widen(uint16_t bits) { return as_float(static_cast<uint32_t>(bits) << 16); }
};

#if FA_BFLOAT16
using Element = Bfloat16;
#else
using Element = Float16;
#endif

}  // namespace fastattention
