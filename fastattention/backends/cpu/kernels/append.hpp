// Appending new keys and values to a cache.
#pragma once

namespace FA_NAMESPACE {

// Writes new token `token` of a sequence, all of its heads, behind what the cache holds; keys are rotated on the way.
template <class Element>
static void append_token(const Call& call, const Sequence& s, int64_t token) {
    const FaAttentionParams& p = *call.params;
    const auto* k_new = static_cast<const Element*>(p.k_new) + s.batch * p.k_new_stride_batch + token * p.k_new_stride_row;
    const auto* v_new = static_cast<const Element*>(p.v_new) + s.batch * p.v_new_stride_batch + token * p.v_new_stride_row;
    // Row 0 of the caches is the first key after the left padding.
    const int64_t row = s.mask.seqlen_k - p.seqlen_new + token;
    auto* k_to = reinterpret_cast<Element*>(s.k(row));
    auto* v_to = reinterpret_cast<Element*>(s.v(row));
    float wide[kMaxHeaddim + Vec::kWidth];
    for (int64_t head = 0; head < p.nheads_k; ++head) {
        const Element* from = k_new + head * p.k_new_stride_head;
        if (p.rotary_dim > 0) {
            widen_row(from, wide, p.headdim, p.headdim);
            rotate_row<Element>(p, s.cache_seqlen + token, wide);
            narrow_row(wide, k_to + head * p.k_stride_head, p.headdim);
        } else {
            memcpy(k_to + head * p.k_stride_head, from, p.headdim * sizeof(Element));
        }
        memcpy(v_to + head * p.v_stride_head, v_new + head * p.v_new_stride_head, p.headdim_v * sizeof(Element));
    }
}

}  // namespace FA_NAMESPACE
