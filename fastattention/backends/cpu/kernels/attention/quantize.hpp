// Quantizes caches, and queries and keys that are multiplied in int8. Results are bit for bit those of
// fastattention/quantized.py.
#pragma once

namespace FA_NAMESPACE {

FA_INLINE float largest_stored(Int8) { return 127.0f; }
FA_INLINE float largest_stored(Float8) { return 448.0f; }

// Rounds to nearest even; |x| is at most 448.
FA_INLINE Float8 to_float8(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    const uint32_t sign = bits >> 24 & 0x80;
    bits &= 0x7fffffff;
    if (bits < 0x3c800000) {  // below 2^-6: a multiple of 2^-9
        float magnitude;
        memcpy(&magnitude, &bits, 4);
        const float shifted = magnitude + 16384.0f;  // aligns 2^-9 with the last bit, so that the addition rounds
        memcpy(&bits, &shifted, 4);
        return {static_cast<uint8_t>(sign | (bits - 0x46800000))};
    }
    return {static_cast<uint8_t>(sign | ((bits - (120u << 23) + 0x7ffff + (bits >> 20 & 1)) >> 20))};
}

FA_INLINE void store_rounded(Int8* to, Vec x) { store(to, round_nearest(x)); }
FA_INLINE void store_rounded(Float8* to, Vec x) {
    float lanes[Vec::kWidth];
    store(lanes, x);
    for (int lane = 0; lane < Vec::kWidth; ++lane) to[lane] = to_float8(lanes[lane]);
}

// The largest magnitude of some values, and whether all are finite. They come in whole vectors, padded with zeros.
class Extent {
public:
    void add(const float* x, int64_t n) {
        for (int64_t i = 0; i < n; i += Vec::kWidth) {
            highest_ = maximum(highest_, absolute(load(x + i)));
            spoiled_ = fma(load(x + i), zero(), spoiled_);  // NaN for infinities and NaN
        }
    }

    float amax() const { return reduce_max(highest_); }
    bool finite() const { return reduce_add(spoiled_) == 0.0f; }

private:
    Vec highest_ = zero(), spoiled_ = zero();
};

// stored = value * factor and value = stored * scale. Both are 0 when all values are.
struct Scaled {
    float scale, factor;

    template <class Stored>
    static Scaled of(const Extent& x, Stored) {
        const float amax = x.amax(), largest = largest_stored(Stored{});
        if (!x.finite()) return {kNan, 0.0f};
        if (amax == 0.0f) return {0.0f, 0.0f};
        // The factor is finite even if amax is so small that its reciprocal is not.
        return {amax / largest, largest / amax < kLargest ? largest / amax : kLargest};
    }
};

// Stores x[0..n) * factor. x is padded with zeros to whole vectors.
template <class Stored>
static void store_quantized(const float* x, int64_t n, float factor, Stored* to) {
    if (factor == 0.0f) {
        memset(to, 0, n * sizeof(Stored));
        return;
    }
    const float largest = largest_stored(Stored{});
    for (int64_t i = 0; i < n; i += Vec::kWidth) {
        const Vec scaled = load(x + i) * broadcast(factor);
        const Vec bounded = maximum(zero() - maximum(zero() - scaled, broadcast(-largest)), broadcast(-largest));
        if (i + Vec::kWidth <= n) {
            store_rounded(to + i, bounded);
        } else {
            Stored last[Vec::kWidth];
            store_rounded(last, bounded);
            memcpy(to + i, last, (n - i) * sizeof(Stored));
        }
    }
}

// Stores a row with its own scale, which is returned.
template <class Stored>
static float quantize_row(const float* x, int64_t n, Stored* to) {
    Extent extent;
    extent.add(x, n);
    const Scaled scaled = Scaled::of(extent, Stored{});
    store_quantized(x, n, scaled.factor, to);
    return scaled.scale;
}

}  // namespace FA_NAMESPACE
