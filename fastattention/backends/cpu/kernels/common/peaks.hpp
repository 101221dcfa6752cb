// Loops that run at the limits of a core. `fastattention bench` reports speed as a fraction of them.
#pragma once

namespace FA_NAMESPACE {

// Independent accumulators, enough to cover the latency of an instruction on every pipe.
static constexpr int kChains = Vec::kRegisters * 3 / 4;

template <class Step>
FA_INLINE float run_chains(int64_t iterations, Step&& step) {
    Vec acc[kChains];
#pragma GCC unroll 24
    for (int i = 0; i < kChains; ++i) acc[i] = broadcast(static_cast<float>(i));
    for (int64_t iteration = 0; iteration < iterations; ++iteration) {
#pragma GCC unroll 24
        for (int i = 0; i < kChains; ++i) acc[i] = step(acc[i]);
    }
    float sum = 0.0f;
    for (int i = 0; i < kChains; ++i) sum += reduce_add(acc[i]);
    return sum;
}

static double fma_loop(int64_t iterations) {
    // Values that the compiler does not know, and whose products neither overflow nor become denormal.
    volatile float factor_value = 0.5f, term_value = 0.25f;
    const Vec factor = broadcast(factor_value), term = broadcast(term_value);
    volatile float sink = run_chains(iterations, [&](Vec acc) { return fma(acc, factor, term); });
    (void)sink;
    return 2.0 * kChains * Vec::kWidth * static_cast<double>(iterations);
}

#if defined(FA_HAS_AMX)
static double bf16_dot_loop(int64_t iterations) {
    AmxPair::begin();
    _tile_zero(4);
    _tile_zero(5);
    _tile_zero(6);
    _tile_zero(7);
    for (int64_t iteration = 0; iteration < iterations; ++iteration) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    AmxPair::end();
    return 4.0 * 2.0 * 16 * 16 * 32 * static_cast<double>(iterations);
}
#elif defined(FA_HAS_MATRICES)
static double bf16_dot_loop(int64_t iterations) {
    volatile float ones_value = 1.00196078f;  // its bits are two bfloat16 near 1
    const Vec ones = broadcast(ones_value);
    volatile float sink = run_chains(iterations, [&](Vec acc) { return multiply_matrices(acc, ones, ones, Bfloat16{}); });
    (void)sink;
    return 8.0 * kChains * Vec::kWidth * static_cast<double>(iterations);
}
#elif defined(FA_HAS_BF16_DOT)
static double bf16_dot_loop(int64_t iterations) {
    volatile float ones_value = 1.00196078f;  // its bits are two bfloat16 near 1
    const Vec ones = broadcast(ones_value);
    volatile float sink = run_chains(iterations, [&](Vec acc) { return dot_pairs(acc, ones, ones); });
    (void)sink;
    return 4.0 * kChains * Vec::kWidth * static_cast<double>(iterations);
}
#endif

// Reads bytes at the speed of memory.
static uint64_t read_loop(const char* data, int64_t bytes) {
    constexpr int64_t kStep = 4 * Vec::kWidth * sizeof(float);
    Vec acc[4] = {zero(), zero(), zero(), zero()};
    for (int64_t at = 0; at + kStep <= bytes; at += kStep) {
        for (int64_t line = 0; line < kStep; line += 64) prefetch(data + at + 4096 + line);
        for (int i = 0; i < 4; ++i)
            acc[i] = maximum(acc[i], load(reinterpret_cast<const float*>(data + at) + i * Vec::kWidth));
    }
    return static_cast<uint64_t>(reduce_max(maximum(maximum(acc[0], acc[1]), maximum(acc[2], acc[3]))) > 0.0f);
}

}  // namespace FA_NAMESPACE
