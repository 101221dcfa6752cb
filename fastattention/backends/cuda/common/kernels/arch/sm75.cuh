// Turing: m16n8k8 and copies through registers.
#pragma once

#include "fragments16.cuh"

namespace fastattention {

// Multiplies operands of m16n8k16, which are those of two m16n8k8 side by side.
struct MmaTwiceM16N8K8 {
    static constexpr int kParts = 2;

    static FA_DEVICE void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, int part) {
        mma_m16n8k8_float16(c, a[2 * part], a[2 * part + 1], part == 0 ? b0 : b1);
    }
};

// Multiplies operands of m16n8k32, which are those of four m8n8k16: two along the rows times two along the depth.
struct MmaFourM8N8K16Int8 {
    static constexpr int kParts = 2;

    static FA_DEVICE void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, int part) {
        const uint32_t b = part == 0 ? b0 : b1;
        mma_m8n8k16_int8(c[0], c[1], a[2 * part], b);
        mma_m8n8k16_int8(c[2], c[3], a[2 * part + 1], b);
    }
};

template <bool kIsInt8>
struct FragmentsOf {
    using Type = Fragments16<MmaTwiceM16N8K8>;
};
template <>
struct FragmentsOf<true> {
    using Type = Fragments16<MmaTwiceM16N8K8, MmaFourM8N8K16Int8>;
};

struct Arch : FragmentsOf<kInt8Products>::Type {
    static constexpr bool kAsyncCopy = false;
    static constexpr bool kSeparateFullTiles = true;

    template <class Item>
    static FA_DEVICE void store_chunk(uint32_t to, Words4 chunk) {
        store_operands<Item>(to, chunk);
    }
};

}  // namespace fastattention
