// Vector exponential and hyperbolic tangent. docs/internals/numerics.md has their error bounds, and tests measure them.
#pragma once

namespace FA_NAMESPACE {

// 2^x for x <= 127, exact 0 for x below -160 and for -inf. Relative error below 2e-7 (kPrecise) or 3e-6 (for a result that
// is rounded to bfloat16 anyway). Minimax polynomials of 2^f, exact at 0: f is the distance from the nearest integer, so that
// the error vanishes as x approaches 0, or from the floor, which takes fewer instructions where there is one for it.
template <bool kPrecise = true>
FA_INLINE Vec exp2(Vec x) {
#ifdef FA_HAS_ABOVE_FLOOR
    if (!kPrecise) {
        const Vec f = above_floor(x);
        Vec p = broadcast(1.342608128e-2f);
        p = fma(p, f, broadcast(5.224298686e-2f));
        p = fma(p, f, broadcast(2.412802130e-1f));
        p = fma(p, f, broadcast(6.930448413e-1f));
        p = fma(p, f, broadcast(1.0f));
        return scale_exponent(p, x);
    }
#endif
    x = maximum(broadcast(-160.0f), x);  // in this order a NaN is kept
    const Vec n = round_nearest(x);
    const Vec f = x - n;
    Vec p = broadcast(1.326472691e-3f);
    p = fma(p, f, broadcast(9.671512660e-3f));
    p = fma(p, f, broadcast(5.550733744e-2f));
    p = fma(p, f, broadcast(2.402224208e-1f));
    p = fma(p, f, broadcast(6.931469776e-1f));
    p = fma(p, f, broadcast(1.0f));
    return scale_exponent(p, n);
}

FA_INLINE float exp2(float x) {
    float lanes[Vec::kWidth];
    store(lanes, exp2<true>(broadcast(x)));
    return lanes[0];
}

// e^x for x <= 88, exact 0 for x below -111 and for -inf. Relative error below 1e-7, for products of hundreds of gates. So
// multiples of ln 2 are taken off in two parts (Cody and Waite), and a minimax polynomial gives 1 + r + r^2 q(r).
FA_INLINE Vec exp(Vec x) {
    constexpr float kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
    x = maximum(broadcast(-111.0f), x);  // in this order a NaN is kept
    const Vec n = round_nearest(x * broadcast(kLog2E));
    const Vec r = fma(n, broadcast(-kLn2Low), fma(n, broadcast(-kLn2High), x));
    Vec q = broadcast(1.381454058e-3f);
    q = fma(q, r, broadcast(8.368745446e-3f));
    q = fma(q, r, broadcast(4.166838899e-2f));
    q = fma(q, r, broadcast(1.666652113e-1f));
    q = fma(q, r, broadcast(4.999999404e-1f));
    return scale_exponent(fma(q, r * r, r) + broadcast(1.0f), n);
}

FA_INLINE float exp(float x) {
    float lanes[Vec::kWidth];
    store(lanes, exp(broadcast(x)));
    return lanes[0];
}

// An odd polynomial near 0, where 1 - 2 / (e^2x + 1) would cancel.
FA_INLINE Vec tanh(Vec x) {
    const Vec magnitude = absolute(x);
    const Vec square = x * x;
    Vec small = broadcast(-5.70498872745e-3f);
    small = fma(small, square, broadcast(2.06390887954e-2f));
    small = fma(small, square, broadcast(-5.37397155531e-2f));
    small = fma(small, square, broadcast(1.33314422036e-1f));
    small = fma(small, square, broadcast(-3.33332819422e-1f));
    small = fma(small * square, x, x);
    // Beyond 10 the result is 1 in float32; the bound also keeps 2^x finite.
    const Vec bounded = broadcast(0.0f) - maximum(broadcast(-10.0f), broadcast(0.0f) - magnitude);
    const Vec power = exp2<true>(bounded * broadcast(2.0f * kLog2E));
    Vec large = broadcast(1.0f) - broadcast(2.0f) / (power + broadcast(1.0f));
    large = select_less(x, broadcast(0.0f), broadcast(0.0f) - large, large);
    return select_less(magnitude, broadcast(0.625f), small, large);
}

// log2 of a positive float. It is used only once per row.
FA_INLINE float log2(float x) { return __builtin_log2f(x); }

}  // namespace FA_NAMESPACE
