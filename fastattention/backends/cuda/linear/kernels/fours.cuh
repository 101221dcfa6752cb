// Four neighbouring columns of a row: values in registers, and gates as they are in memory.
#pragma once

#include "gates.cuh"
#include "variant.cuh"

namespace fastattention {

// Values of four neighbouring columns.
struct Four {
    float x[4];

    Four() = default;
    explicit FA_DEVICE Four(float all) : x{all, all, all, all} {}

    static FA_DEVICE Four load(uint32_t at) {
        const Words4 words = load_shared_128(at);
        Four result;
#pragma unroll
        for (int i = 0; i < 4; ++i) result.x[i] = as_float(words.word[i]);
        return result;
    }

    FA_DEVICE Words4 words() const { return {as_bits(x[0]), as_bits(x[1]), as_bits(x[2]), as_bits(x[3])}; }
    FA_DEVICE Words2 packed() const { return {Operand::pack(x[0], x[1]), Operand::pack(x[2], x[3])}; }
};

FA_DEVICE Four operator*(const Four& a, const Four& b) {
    Four result;
#pragma unroll
    for (int i = 0; i < 4; ++i) result.x[i] = a.x[i] * b.x[i];
    return result;
}

FA_DEVICE Four chosen(bool first, const Four& a, const Four& b) {
    Four result;
#pragma unroll
    for (int i = 0; i < 4; ++i) result.x[i] = first ? a.x[i] : b.x[i];
    return result;
}

FA_DEVICE uint32_t half_of(const Words2& words, int i) { return words.word[i / 2] >> i % 2 * 16 & 0xffffu; }
FA_DEVICE float element_of(const Words2& words, int i) { return Element::widen(static_cast<uint16_t>(half_of(words, i))); }

// Reads gates from memory, four neighbours at once.
template <int kFormat>
struct Gates {
    using Number = uint16_t;
    using Words = Words2;
    static FA_DEVICE Words read(const Number* at) { return load_global_64(at); }
    static FA_DEVICE uint32_t bits(const Words& words, int i) { return half_of(words, i); }
};
template <>
struct Gates<kFloat32> {
    using Number = float;
    using Words = Words4;
    static FA_DEVICE Words read(const Number* at) { return load_global_128(at); }
    static FA_DEVICE uint32_t bits(const Words& words, int i) { return words.word[i]; }
};

}  // namespace fastattention
