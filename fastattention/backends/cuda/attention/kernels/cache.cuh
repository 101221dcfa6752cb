// Lengths of a KV cache, for the kernels that read it and those that append to it.
#pragma once

#include "intrinsics.cuh"
#include "params.h"

namespace fastattention {

// Unused tokens of a cache row, before the sequence begins.
template <class Params>
FA_DEVICE int leftpad_of(const Params& p, int batch) {
    return p.cache_leftpad == nullptr ? 0 : p.cache_leftpad[batch];
}

FA_DEVICE int tokens_before(const AppendParams& p, int batch) { return p.cache_seqlens[batch]; }

// Keys that are not in a cache count as a full cache.
FA_DEVICE int tokens_before(const AttentionParams& p, int batch) {
    return p.cache_seqlens == nullptr ? p.seqlen_k : p.cache_seqlens[batch];
}

// The tokens of a sequence in its cache before this call's append.
struct CachedTokens {
    int count;  // including pad
    int pad;    // unused tokens at the start

    template <class Params>
    FA_DEVICE CachedTokens(const Params& p, int batch) : count(tokens_before(p, batch)), pad(leftpad_of(p, batch)) {}

    // Whether the cache has room for the append and the lengths are valid.
    template <class Params>
    FA_DEVICE bool are_within_capacity(const Params& p) const {
        return count <= p.max_cache_seqlen && 0 <= pad && pad <= count;
    }
};

template <class Params>
FA_DEVICE bool is_within_capacity(const Params& p, int batch) {
    return CachedTokens(p, batch).are_within_capacity(p);
}

// Tells the host of a sequence for which `is_within_capacity` is false: sequence + 1, and the length in the upper half.
// One store, as other sequences may write too. See length_report.py.
FA_DEVICE void report_length(const AttentionParams& p, int batch) {
    if (p.report_at == 0 || thread_index() != 0) return;
    using Word = unsigned long long;
    const Word length = static_cast<uint32_t>(p.cache_seqlens[batch]);
    *reinterpret_cast<volatile Word*>(p.report_at) = length << 32 | static_cast<uint32_t>(batch + 1);
}

}  // namespace fastattention
