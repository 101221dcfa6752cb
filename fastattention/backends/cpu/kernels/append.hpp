// Appending new keys and values to a cache.
#pragma once

namespace FA_NAMESPACE {

// Writes head `head` of new token `token`, rotated when the call asks for it.
template <class Element>
static void append_key(const FaAttentionParams& p, const Sequence& s, int64_t token, int64_t head, Element* to) {
    const Element* from = static_cast<const Element*>(p.k_new) + s.batch * p.k_new_stride_batch +
                          token * p.k_new_stride_row + head * p.k_new_stride_head;
    if (p.rotary_dim == 0) {
        memcpy(to, from, p.headdim * sizeof(Element));
        return;
    }
    float wide[kMaxHeaddim + Vec::kWidth];
    widen_row(from, wide, p.headdim, p.headdim);
    rotate_row<Element>(p, s.cache_seqlen + token, wide);
    narrow_row(wide, to, p.headdim);
}

template <class Element>
FA_INLINE const Element* new_value(const FaAttentionParams& p, const Sequence& s, int64_t token, int64_t head) {
    return static_cast<const Element*>(p.v_new) + s.batch * p.v_new_stride_batch + token * p.v_new_stride_row +
           head * p.v_new_stride_head;
}

// Writes new token `token` of a sequence, all of its heads, behind what the cache holds; keys are rotated on the way.
template <class Element>
static void append_token(const Call& call, const Sequence& s, int64_t token) {
    const FaAttentionParams& p = *call.params;
    // Row 0 of the caches is the first key after the left padding.
    const int64_t row = s.mask.seqlen_k - p.seqlen_new + token;
    auto* k_to = reinterpret_cast<Element*>(s.k(row));
    auto* v_to = reinterpret_cast<Element*>(s.v(row));
    for (int64_t head = 0; head < p.nheads_k; ++head) {
        append_key(p, s, token, head, k_to + head * p.k_stride_head);
        memcpy(v_to + head * p.v_stride_head, new_value<Element>(p, s, token, head), p.headdim_v * sizeof(Element));
    }
}

}  // namespace FA_NAMESPACE
