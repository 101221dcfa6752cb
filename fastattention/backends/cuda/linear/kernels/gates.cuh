// Gates, which may be of another dtype than q, k and v.
#pragma once

#include "element.cuh"

namespace fastattention {

// Reads the bits of a value; widening it here would wait for the load. format: see step_params.h.
FA_DEVICE uint32_t read_bits(const void* numbers, int64_t at, int format) {
    return format == 0 ? static_cast<const uint32_t*>(numbers)[at] : static_cast<const uint16_t*>(numbers)[at];
}

FA_DEVICE float widen_bits(uint32_t bits, int format) {
    if (format == 0) return as_float(bits);
    const uint16_t half = static_cast<uint16_t>(bits);
    return format == 1 ? Float16::widen(half) : Bfloat16::widen(half);
}

// Computes a gate from its logarithm; 0 for -infinity. Gates near 1 are accurate to half a unit in the last place: over many
// thousand tokens, errors in one direction would add up in the state.
FA_DEVICE float gate_of(float log) {
    const float near = 1.0f + log * (1.0f + log * (1.0f / 2 + log * (1.0f / 6 + log * (1.0f / 24 + log * (1.0f / 120)))));
    return log > -0.125f && log < 0.125f ? near : exp_exact(log);
}

}  // namespace fastattention
