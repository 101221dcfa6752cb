// A cache in interleaved panels: its layout, the append of tokens, and how prefill reads it.
//
// Keys and values of a head are in panels of kCachePanel tokens, in units: two adjacent bfloat16 (of a key, or of two
// tokens' values), one float16 or one float. The layout is the same for every instruction set:
//
//   keys    (panels, units of a key, kCachePanel tokens)
//   values  (panels, kCachePanel / tokens of a unit, headdim_v)
//
// The last unit of a key with an odd count of bfloat16 is padded with 0. Memory after a sequence's tokens is arbitrary.
// Whole vectors may be read: 64 bytes of memory follow the last value.
#pragma once

namespace FA_NAMESPACE {

static constexpr int64_t kCachePanel = 32;

template <class Element>
struct CacheUnit {
    using Stored = Element;
    static constexpr int64_t kElements = 1;
};
template <>
struct CacheUnit<Bfloat16> {
    using Stored = float;
    static constexpr int64_t kElements = 2;
};

// The cache of one head of one sequence.
template <class Element>
struct PanelCache {
    static constexpr int64_t kElements = CacheUnit<Element>::kElements;
    using Stored = typename CacheUnit<Element>::Stored;

    Stored* keys;
    Stored* values;
    int64_t key_units;  // units per key
    int64_t headdim_v;

    PanelCache(const Call& call, const Sequence& s, int64_t kv_head)
        : keys(reinterpret_cast<Stored*>(call.keys(s, kv_head).base)),
          values(reinterpret_cast<Stored*>(call.values(s, kv_head).base)),
          key_units((call.params->headdim + kElements - 1) / kElements),
          headdim_v(call.params->headdim_v) {}

    // Unit 0 of token `token`. The next unit of a key is kCachePanel units further on, the next unit of a value is adjacent.
    Stored* key(int64_t token) const { return keys + token / kCachePanel * key_units * kCachePanel + token % kCachePanel; }
    Stored* value(int64_t token) const { return values + token / kElements * headdim_v; }

    // Copies the values of n tokens, starting at `token`, the first of a panel, with zeros for the rest of the panel.
    void copy_values(int64_t token, int64_t n, Stored* to) const {
        const int64_t whole = n / kElements;
        memcpy(to, value(token), whole * headdim_v * sizeof(Stored));
        memset(to + whole * headdim_v, 0, (kCachePanel / kElements - whole) * headdim_v * sizeof(Stored));
        if (n % kElements == 0) return;
        const auto* from = reinterpret_cast<const Element*>(value(token + n - 1));
        auto* last = reinterpret_cast<Element*>(to + whole * headdim_v);
        for (int64_t c = 0; c < headdim_v; ++c) last[c * kElements] = from[c * kElements];
    }
};

// Writes all heads of new token `token` of a sequence after the tokens in the cache.
template <class Element>
static void append_panel_token(const Call& call, const Sequence& s, int64_t token) {
    constexpr int64_t kElements = CacheUnit<Element>::kElements;
    const FaAttentionParams& p = *call.params;
    const int64_t row = s.mask.seqlen_k - p.seqlen_new + token;
    Element key[kMaxHeaddim + kElements];
    for (int64_t head = 0; head < p.nheads_k; ++head) {
        const PanelCache<Element> cache(call, s, head);
        append_key(p, s, token, head, key);
        key[p.headdim] = {};
        for (int64_t u = 0; u < cache.key_units; ++u)
            memcpy(cache.key(row) + u * kCachePanel, key + u * kElements, sizeof(*cache.keys));
        auto* value = reinterpret_cast<Element*>(cache.value(row)) + row % kElements;
        const Element* from = new_value<Element>(p, s, token, head);
        for (int64_t c = 0; c < p.headdim_v; ++c) value[c * kElements] = from[c];
    }
}

// pack_panel of prefill for a cache in panels. CachedUnit: how units of the cache are loaded.
template <class Element, class CachedUnit, class Unit>
static void pack_cached_panel(const Call& call, const HeadPanels& head, int64_t panel, Unit) {
    constexpr int kOperands = CachedUnit::kOperands;
    const Sequence& s = call.sequences[head.sequence];
    const PanelGeometry g = panel_geometry<Unit>(*call.params);
    const PanelCache<Element> cache(call, s, head.kv_head);
    const int64_t first = panel * kPanel;
    const int64_t n = smaller(kPanel, s.mask.seqlen_k - first);
    float* keys = head.keys + first * g.key_units;
    memset(keys, 0, g.key_units * kPanel * sizeof(float));
    for (int64_t j = 0; j < n; j += Vec::kWidth)
        for (int64_t u = 0; u < cache.key_units; ++u) {
            Vec units[kOperands];
            CachedUnit::load_units(cache.key(first + j) + u * kCachePanel, units);
            for (int o = 0; o < kOperands && u * kOperands + o < g.key_units; ++o)
                store(keys + (u * kOperands + o) * kPanel + j, units[o]);
        }
    // Values of padding tokens must be 0, like their weights: 0 times arbitrary memory might be NaN.
    typename PanelCache<Element>::Stored tail[kCachePanel * kMaxHeaddimV / PanelCache<Element>::kElements + Vec::kWidth];
    constexpr int64_t kCopyTokens = kPanel < kCachePanel ? kPanel : kCachePanel;
    for (int64_t j = 0; j < kPanel; j += kCopyTokens) {
        const auto* from = cache.value(first + j);
        if (j + kCopyTokens > n) {
            cache.copy_values(first + j, larger(n - j, 0), tail);
            from = tail;
        }
        float* to = head.values + (first + j) / g.keys_per_unit * g.value_stride;
        for (int64_t unit = 0; unit < kCopyTokens / PanelCache<Element>::kElements; ++unit)
            for (int64_t c = 0; c < g.value_columns; c += Vec::kWidth) {
                Vec units[kOperands];
                CachedUnit::load_units(from + unit * cache.headdim_v + c, units);
                for (int o = 0; o < kOperands; ++o) store(to + (unit * kOperands + o) * g.value_stride + c, units[o]);
            }
    }
}

}  // namespace FA_NAMESPACE
