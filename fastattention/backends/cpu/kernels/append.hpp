// Appending new keys and values to a cache.
#pragma once

namespace FA_NAMESPACE {

// Writes one head of a new key or value, given as floats, and its scale.
template <class Stored>
FA_INLINE void store_token(const float* wide, int64_t n, Stored* to, char* scale_to) {
    const float scale = quantise_row(wide, n, to);
    memcpy(scale_to, &scale, sizeof(scale));
}

// Writes new token `token` of a sequence, all of its heads, behind what the cache holds; keys are rotated on the way, and
// both are quantised, from floats, where the cache is.
template <class Element, class Stored>
static void append_token(const Call& call, const Sequence& s, int64_t token) {
    const FaAttentionParams& p = *call.params;
    const auto* k_new = static_cast<const Element*>(p.k_new) + s.batch * p.k_new_stride_batch + token * p.k_new_stride_row;
    const auto* v_new = static_cast<const Element*>(p.v_new) + s.batch * p.v_new_stride_batch + token * p.v_new_stride_row;
    // Row 0 of the caches is the first key after the left padding.
    const int64_t row = s.mask.seqlen_k - p.seqlen_new + token;
    auto* k_to = reinterpret_cast<Stored*>(s.k(row));
    auto* v_to = reinterpret_cast<Stored*>(s.v(row));
    float wide[kMaxHeaddim + Vec::kWidth];
    for (int64_t head = 0; head < p.nheads_k; ++head) {
        const Element* k_from = k_new + head * p.k_new_stride_head;
        const Element* v_from = v_new + head * p.v_new_stride_head;
        if (p.rotary_dim > 0 || kQuantised<Stored>) widen_row(k_from, wide, p.headdim, round_up(p.headdim, Vec::kWidth));
        if (p.rotary_dim > 0) rotate_row<Element>(p, s.cache_seqlen + token, wide);
        if constexpr (kQuantised<Stored>) {
            store_token(wide, p.headdim, k_to + head * p.k_stride_head, call.key_scales(s, head)(row));
            widen_row(v_from, wide, p.headdim_v, round_up(p.headdim_v, Vec::kWidth));
            store_token(wide, p.headdim_v, v_to + head * p.v_stride_head, call.value_scales(s, head)(row));
        } else {
            if (p.rotary_dim > 0) {
                narrow_row(wide, k_to + head * p.k_stride_head, p.headdim);
            } else {
                memcpy(k_to + head * p.k_stride_head, k_from, p.headdim * sizeof(Element));
            }
            memcpy(v_to + head * p.v_stride_head, v_from, p.headdim_v * sizeof(Element));
        }
    }
}

}  // namespace FA_NAMESPACE
