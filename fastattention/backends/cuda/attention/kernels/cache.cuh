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

FA_DEVICE int tokens_before(const AppendParams& p, int batch) { return p.cache_seqlens[batch]; }

// Keys that are no cache are one that is full.
FA_DEVICE int tokens_before(const AttentionParams& p, int batch) {
    return p.cache_seqlens == nullptr ? p.seqlen_k : p.cache_seqlens[batch];
}

// What a sequence has in its cache before this call's append.
struct CachedTokens {
    int count;  // with those that belong to nobody:
    int pad;

    template <class Params>
    FA_DEVICE CachedTokens(const Params& p, int batch) : count(tokens_before(p, batch)), pad(leftpad_of(p, batch)) {}

    // Whether there is room for what was to be appended, and the numbers make sense.
    template <class Params>
    FA_DEVICE bool are_within_capacity(const Params& p) const {
        return count <= p.max_cache_seqlen && 0 <= pad && pad <= count;
    }
};

template <class Params>
FA_DEVICE bool is_within_capacity(const Params& p, int batch) {
    return CachedTokens(p, batch).are_within_capacity(p);
}

}  // namespace fastattention
