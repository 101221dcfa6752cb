// Ampere and newer: m16n8k16, asynchronous copies, bfloat16.
#pragma once

#include "fragments8.cuh"

namespace fastattention {

struct MmaM16N8K16 {
    static constexpr int kParts = 1;

    static FA_DEVICE void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, int /*part*/) {
        if constexpr (Operand::kIsBfloat16) {
            mma_m16n8k16_bfloat16(c, a, b0, b1);
        } else {
            mma_m16n8k16_float16(c, a, b0, b1);
        }
    }
};

// Multiplies bytes; the accumulators hold the bits of integers in floats.
struct MmaM16N8K32Int8 {
    static constexpr int kParts = 1;

    static FA_DEVICE void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, int /*part*/) {
        mma_m16n8k32_int8(c, a, b0, b1);
    }
};

template <bool kIsQuantized, bool kIsInt8>
struct FragmentsOf {
    using Type = Fragments16<MmaM16N8K16>;
};
template <>
struct FragmentsOf<true, false> {
    using Type = Fragments8<MmaM16N8K16>;
};
template <>
struct FragmentsOf<false, true> {
    using Type = Fragments16<MmaM16N8K16, MmaM16N8K32Int8>;
};

struct Arch : FragmentsOf<kQuantized, kInt8Products>::Type {
    static constexpr bool kAsyncCopy = true;
    static constexpr bool kSeparateFullTiles = false;  // it costs registers, and instruction issue is no bottleneck
};

}  // namespace fastattention
