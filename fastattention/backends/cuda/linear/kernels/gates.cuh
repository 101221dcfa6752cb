// Gates, which may be of another dtype than q, k and v.
#pragma once

#include "any_dtype.cuh"

namespace fastattention {

// Computes a gate from its logarithm; 0 for -infinity. Gates near 1 are accurate to half a unit in the last place: over many
// thousand tokens, errors in one direction would add up in the state.
FA_DEVICE float gate_of(float log) {
    const float near = 1.0f + log * (1.0f + log * (1.0f / 2 + log * (1.0f / 6 + log * (1.0f / 24 + log * (1.0f / 120)))));
    return log > -0.125f && log < 0.125f ? near : exp_exact(log);
}

}  // namespace fastattention
