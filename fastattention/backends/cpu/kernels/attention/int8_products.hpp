// Products of queries and keys in int8, by the formula of fastattention/quantized.py. Each query has a scale, and so has
// each group of keys. Keys lose their mean first, and scores get back the product of the query with that mean.
#pragma once

namespace FA_NAMESPACE {

// Keys that share a scale, as in fastattention/quantized.py.
static constexpr int64_t kKeysOfScale = 64;
static_assert(kKeysOfScale % kPanel == 0, "a panel has one");

// Tokens whose keys are summed in float. These sums are summed in double.
static constexpr int64_t kMeanTokens = 128;

// Writes HeadPanels::key_mean, the mean of all keys of the sequence, whether or not a query sees them. Elements that are not
// finite count as 0.
template <class Element>
static void key_mean(const Call& call, const HeadPanels& head) {
    const Sequence& s = call.sequences[head.sequence];
    const Rows keys = call.keys(s, head.kv_head);
    const int64_t n = call.params->headdim, padded = round_up(n, Vec::kWidth), seqlen_k = s.mask.seqlen_k;
    double total[kMaxHeaddim + Vec::kWidth] = {};
    for (int64_t first = 0; first < seqlen_k; first += kMeanTokens) {
        const int64_t count = smaller(kMeanTokens, seqlen_k - first);
        char* rows[kMeanTokens];
        keys.addresses(first, count, rows);
        float sum[kMaxHeaddim + Vec::kWidth] = {}, key[kMaxHeaddim + Vec::kWidth];
        for (int64_t j = 0; j < count; ++j) {
            widen_row(reinterpret_cast<const Element*>(rows[j]), key, n, padded);
            for (int64_t c = 0; c < padded; c += Vec::kWidth) {
                const Vec x = load(key + c);
                const Vec finite = select_less(absolute(x), broadcast(kInfinity), x, zero());
                // Divided first, so that no sum of floats overflows.
                store(sum + c, fma(finite, broadcast(1.0f / kMeanTokens), load(sum + c)));
            }
        }
        for (int64_t c = 0; c < n; ++c) total[c] += sum[c];
    }
    float mean[kMaxHeaddim];
    for (int64_t c = 0; c < n; ++c) mean[c] = static_cast<float>(total[c] * kMeanTokens / static_cast<double>(seqlen_k));
    Bfloat16 rounded[kMaxHeaddim];
    narrow_row(mean, rounded, n);
    widen_row(rounded, head.key_mean, n, padded);
}

#ifdef FA_HAS_AMX
using KeyQuad = AmxQuad;
#elif defined(FA_HAS_MATRICES)
using KeyQuad = MatrixQuad;
#elif defined(FA_HAS_QUADS)
using KeyQuad = Int8Quad;
#endif

// Loads a key less the mean, padded with zeros.
template <class Element>
FA_INLINE void load_smoothed(const char* from, const float* mean, float* key, int64_t n, int64_t padded) {
    widen_row(reinterpret_cast<const Element*>(from), key, n, padded);
    for (int64_t c = 0; c < padded; c += Vec::kWidth) store(key + c, load(key + c) - load(mean + c));
}

// The scale of the group of keys that includes key `first`. A group may have several panels.
template <class Element>
static Scaled scale_of_group(const Call& call, const HeadPanels& head, int64_t first) {
    const Sequence& s = call.sequences[head.sequence];
    const int64_t n = call.params->headdim, padded = round_up(n, Vec::kWidth);
    const int64_t begin = first / kKeysOfScale * kKeysOfScale, count = smaller(kKeysOfScale, s.mask.seqlen_k - begin);
    char* rows[kKeysOfScale];
    call.keys(s, head.kv_head).addresses(begin, count, rows);
    Extent extent;
    for (int64_t j = 0; j < count; ++j) {
        float key[kMaxHeaddim + Vec::kWidth];
        load_smoothed<Element>(rows[j], head.key_mean, key, n, padded);
        extent.add(key, padded);
    }
    return Scaled::of(extent, Int8{});
}

// Writes a key less the mean as quads. Returns the initial value of sums of its products.
template <class Quad, class Element>
FA_INLINE int32_t quantize_key(const char* from, const float* mean, float factor, float* quads, int64_t n) {
    const int64_t padded = round_up(n, Vec::kWidth);
    float key[kMaxHeaddim + Vec::kWidth];
    load_smoothed<Element>(from, mean, key, n, padded);
    auto* stored = reinterpret_cast<Int8*>(quads);
    store_quantized(key, padded, factor, stored);
    int32_t sum = 0;
    for (int64_t i = 0; i < padded; ++i) sum += stored[i].value;
    return -Quad::kOffset * sum;
}

// The terms that turn products with a query into scores.
struct QueryScale {
    float scale;
    float of_mean;  // the query times the mean of keys
};

// Writes a query as `units` quads. `quads` has room for a whole vector more.
template <class Element, class Quad>
static QueryScale quantize_query(const Call& call, const Sequence& s, QueryRow at, const float* mean, float* quads,
                                 int64_t units) {
    const int64_t padded = round_up(call.params->headdim, Vec::kWidth);
    float query[kMaxHeaddim + Vec::kWidth];
    load_query<Element>(call, s, at, query, padded);
    Vec of_mean = zero();
    for (int64_t c = 0; c < padded; c += Vec::kWidth) of_mean = fma(load(query + c), load(mean + c), of_mean);
    memset(quads, 0, units * sizeof(float));
    const float scale = quantize_row(query, padded, reinterpret_cast<Int8*>(quads));
    auto* bytes = reinterpret_cast<uint8_t*>(quads);
    for (int64_t i = 0; i < units * Quad::kElements; ++i) bytes[i] += Quad::kOffset;
    return {scale, reduce_add(of_mean)};
}

// Turns integer products with n keys, and the memory after them up to a multiple of kVectorsAtOnce vectors, into floats.
// Returns the highest in each lane. Two chains of maxima are used, as one would take longer than everything else.
static constexpr int64_t kVectorsAtOnce = 2;

FA_INLINE Vec scale_products(float* scores, const float* key_scales, QueryScale query, int64_t n) {
    static_assert(kVectors % kVectorsAtOnce == 0, "scores and scales of whole panels are there");
    const Vec scale = broadcast(query.scale), of_mean = broadcast(query.of_mean);
    Vec highest[kVectorsAtOnce] = {broadcast(-kInfinity), broadcast(-kInfinity)};
    for (int64_t j = 0; j < n; j += kVectorsAtOnce * Vec::kWidth)
#pragma GCC unroll 2
        for (int64_t i = 0; i < kVectorsAtOnce; ++i) {
            float* at = scores + j + i * Vec::kWidth;
            const Vec key_scale = load(key_scales + j + i * Vec::kWidth);
            const Vec score = fma(integers_to_floats(load(at)), key_scale * scale, of_mean);
            store(at, score);
            highest[i] = maximum(highest[i], score);
        }
    return maximum(highest[0], highest[1]);
}

}  // namespace FA_NAMESPACE
