// Factors of a chunk, which kernels of chunked linear attention with one gate per head hand to each other.
#pragma once

#include "chunk.cuh"

namespace fastattention {

constexpr bool kDeltaRule = Config::delta_rule;

// Per-token factors of a chunk. Each enumerator names what the factor scales.
enum FactorPlane {
    kKeysOfState,     // what the state holds for its key
    kQueriesOfState,  // what the state holds for its query
    kKeysToState,     // what it adds to the state after the chunk
    kBetas,           // beta
};
constexpr int kStateFactor = 4 * kChunk;   // the index of the factor of the state itself
constexpr int kFactors = 4 * kChunk + 4;  // rounded up to 16 bytes

}  // namespace fastattention
