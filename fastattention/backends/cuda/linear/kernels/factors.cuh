// What the kernels of chunked linear attention with one gate a head tell each other of a chunk.
#pragma once

#include "chunk.cuh"

namespace fastattention {

constexpr bool kDeltaRule = Config::delta_rule;

// A plane has a number for each token, which multiplies
enum FactorPlane {
    kKeysOfState,     // what the state holds for its key
    kQueriesOfState,  // what its query finds in the state
    kKeysToState,     // what it leaves in the state behind the chunk
    kBetas,           // beta
};
constexpr int kStateFactor = 4 * kChunk;   // where the factor of the state itself stands
constexpr int kFactors = Config::num_factors;

}  // namespace fastattention
