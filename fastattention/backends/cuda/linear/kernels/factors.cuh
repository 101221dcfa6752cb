// Factors of a chunk, which kernels of chunked linear attention hand to each other.
#pragma once

#include "chunk.cuh"

namespace fastattention {

constexpr bool kDeltaRule = Config::delta_rule;
constexpr bool kGatePerKey = Config::gate_per_key;

// Per-token factors of a chunk with one gate per head. Each enumerator names what the factor scales.
enum FactorPlane {
    kKeysOfState,     // what the state holds for its key
    kQueriesOfState,  // what the state holds for its query
    kKeysToState,     // what it adds to the state after the chunk
    kBetas,           // beta
};
constexpr int kStateFactor = 4 * kChunk;   // where the factor of the state itself stands
constexpr int kFactors = Config::num_factors;

// Where the factor of a token stands. With a gate for every key dimension, the factors of the state's key dimensions come
// first. Of tokens only betas follow, with the delta rule.
FA_DEVICE constexpr int factor_of_token(FactorPlane plane, int token) {
    return (kGatePerKey ? Config::key_columns : plane * kChunk) + token;
}

}  // namespace fastattention
