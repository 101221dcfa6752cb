// Converts bytes of a quantized cache to operands of matrix products.
//
// Both formats become float16 in a few instructions. int8 with an inverted sign bit is the low half of a float16 between
// 1024 and 1279. float8 has float16's layout with fewer bits; as float16 it is 2^-8 of its value (kStoredFactor).
#pragma once

#include "cache_format.cuh"
#include "variant.cuh"

namespace fastattention {

constexpr float kStoredFactor = kInt8 ? 1.0f : 256.0f;  // multiplies scales

// Converts bytes kFirst and kSecond of a word to two operands.
template <int kFirst, int kSecond>
FA_DEVICE uint32_t widen_bytes(uint32_t word) {
    uint32_t pair;
    if constexpr (kInt8) {
        // Puts both bytes below 0x64, which gives 1024 plus an integer from 0 to 255.
        pair = permute_bytes(word ^ 0x80808080u, 0x64646464u, kFirst | 4 << 4 | kSecond << 8 | 4 << 12);
        pair = subtract_float16(pair, 0x64806480u);
    } else {
        pair = permute_bytes(word, 0, 4 | kFirst << 4 | 4 << 8 | kSecond << 12);
        pair = (pair & 0x80008000u) | (pair >> 1 & 0x3f803f80u);
    }
    if constexpr (Operand::kIsBfloat16)
        return Operand::pack(Float16::widen(static_cast<uint16_t>(pair)), Float16::widen(static_cast<uint16_t>(pair >> 16)));
    return pair;
}

}  // namespace fastattention
