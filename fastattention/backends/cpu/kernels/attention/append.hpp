// Appends new keys and values to a KV cache.
#pragma once

namespace FA_NAMESPACE {

// The key, before its rotation, or the value of new token `token` and head `head`.
template <class Element>
FA_INLINE const Element* new_key(const FaAttentionParams& p, const Sequence& s, int64_t token, int64_t head) {
    return static_cast<const Element*>(p.k_new) + s.batch * p.k_new_stride_batch + token * p.k_new_stride_row +
           head * p.k_new_stride_head;
}

template <class Element>
FA_INLINE const Element* new_value(const FaAttentionParams& p, const Sequence& s, int64_t token, int64_t head) {
    return static_cast<const Element*>(p.v_new) + s.batch * p.v_new_stride_batch + token * p.v_new_stride_row +
           head * p.v_new_stride_head;
}

// Loads a new key as floats, rotated when the call asks for it; `to` is padded to whole vectors.
template <class Element>
FA_INLINE void load_new_key(const FaAttentionParams& p, const Sequence& s, int64_t token, int64_t head, float* to) {
    widen_row(new_key<Element>(p, s, token, head), to, p.headdim, round_up(p.headdim, Vec::kWidth));
    if (p.rotary_dim > 0) rotate_row<Element>(p, s.cache_seqlen + token, to);
}

// Writes head `head` of new token `token`, rotated when the call asks for it.
template <class Element>
static void append_key(const FaAttentionParams& p, const Sequence& s, int64_t token, int64_t head, Element* to) {
    if (p.rotary_dim == 0) {
        memcpy(to, new_key<Element>(p, s, token, head), p.headdim * sizeof(Element));
        return;
    }
    float wide[kMaxHeaddim + Vec::kWidth];
    load_new_key<Element>(p, s, token, head, wide);
    narrow_row(wide, to, p.headdim);
}

// Writes one head of a new key or value, given as floats, and its scale.
template <class Stored>
FA_INLINE void store_token(const float* wide, int64_t n, Stored* to, char* scale_to) {
    const float scale = quantize_row(wide, n, to);
    memcpy(scale_to, &scale, sizeof(scale));
}

// Writes all heads of new token `token` of a sequence after the tokens in the cache. Keys are rotated if the call asks for
// it; both are quantized from floats if the cache is.
template <class Element, class Stored>
static void append_token(const Call& call, const Sequence& s, int64_t token) {
    const FaAttentionParams& p = *call.params;
    // Row 0 of the caches is the first key after the left padding.
    const int64_t row = s.mask.seqlen_k - p.seqlen_new + token;
    auto* k_to = reinterpret_cast<Stored*>(s.k(row));
    auto* v_to = reinterpret_cast<Stored*>(s.v(row));
    for (int64_t head = 0; head < p.nheads_k; ++head) {
        const Element* value = new_value<Element>(p, s, token, head);
        if constexpr (kQuantized<Stored>) {
            float wide[kMaxHeaddim + Vec::kWidth];
            load_new_key<Element>(p, s, token, head, wide);
            store_token(wide, p.headdim, k_to + head * p.k_stride_head, call.key_scales(s, head)(row));
            widen_row(value, wide, p.headdim_v, round_up(p.headdim_v, Vec::kWidth));
            store_token(wide, p.headdim_v, v_to + head * p.v_stride_head, call.value_scales(s, head)(row));
        } else {
            append_key<Element>(p, s, token, head, k_to + head * p.k_stride_head);
            // Values that are part of the keys have been written with them.
            if (!values_in_keys(p)) memcpy(v_to + head * p.v_stride_head, value, p.headdim_v * sizeof(Element));
        }
    }
}

}  // namespace FA_NAMESPACE
