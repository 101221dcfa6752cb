// What kernels that read a cache and those that write it must agree on.
#pragma once

#include "intrinsics.cuh"
#include "params.h"

namespace fastattention {

// Tokens of a cache's row that belong to nobody, before the sequence begins.
template <class Params>
FA_DEVICE int leftpad_of(const Params& p, int batch) {
    return p.cache_leftpad == nullptr ? 0 : p.cache_leftpad[batch];
}

// Whether a sequence's cache has room for what was to be appended, and its numbers make sense.
template <class Params>
FA_DEVICE bool is_within_capacity(const Params& p, int batch) {
    const int before = p.cache_seqlens[batch], pad = leftpad_of(p, batch);
    return before <= p.max_cache_seqlen && 0 <= pad && pad <= before;
}

}  // namespace fastattention
