// Tests the native library without Python: small calls of every element type and instruction set against a plain loop in
// double. scripts/check_aarch64 builds it for 64-bit Arm and runs it under emulation. Exits with 1 if a result is wrong.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "attention/params.h"
#include "common/dtype.h"

extern "C" int64_t fastattention_num_isas();
extern "C" const char* fastattention_isa_name(int64_t isa);
extern "C" int64_t fastattention_forward(int64_t isa, const FaAttentionParams* plan, const void* addresses,
                                         int64_t num_threads);

namespace {

struct Shape {
    int64_t seqlen_q, seqlen_k, nheads, nheads_k, headdim, headdim_v, window_right;
    bool values_in_keys = false;  // values are the first columns of the keys, in the same memory

    int64_t value_stride() const { return values_in_keys ? headdim : headdim_v; }
};

float from_bfloat16(uint16_t bits) {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
}

float from_float16(uint16_t bits) {
    const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    const float magnitude = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -24)
                                          : std::ldexp(static_cast<float>(mantissa + 1024), exponent - 25);
    return bits & 0x8000 ? -magnitude : magnitude;
}

// A tensor as the library reads it, and the exact values it holds.
struct Tensor {
    std::vector<char> bytes;
    std::vector<double> values;
};

double read(const char* at, int64_t dtype) {
    if (dtype == FA_FLOAT32) {
        float value;
        std::memcpy(&value, at, 4);
        return value;
    }
    uint16_t bits;
    std::memcpy(&bits, at, 2);
    return dtype == FA_BFLOAT16 ? from_bfloat16(bits) : from_float16(bits);
}

Tensor random_tensor(int64_t count, int64_t dtype, std::mt19937& generator) {
    const int64_t size = dtype == FA_FLOAT32 ? 4 : 2;
    Tensor tensor{std::vector<char>(count * size), std::vector<double>(count)};
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < count; ++i) {
        const float value = normal(generator);
        if (dtype == FA_FLOAT32) {
            std::memcpy(&tensor.bytes[i * 4], &value, 4);
        } else {
            uint32_t bits;
            std::memcpy(&bits, &value, 4);
            uint16_t half = bits >> 16;  // bfloat16 by truncation
            if (dtype == FA_FLOAT16) {   // sign, an exponent near the middle, a random mantissa
                half = static_cast<uint16_t>((bits >> 16 & 0x8000) | (12 + bits % 4) << 10 | (bits >> 4 & 1023));
            }
            std::memcpy(&tensor.bytes[i * 2], &half, 2);
        }
        tensor.values[i] = read(&tensor.bytes[i * size], dtype);
    }
    return tensor;
}

FaAttentionParams make_params(const Shape& s, int64_t dtype, Tensor& q, Tensor& k, Tensor& v, std::vector<char>& out,
                              std::vector<float>& lse) {
    FaAttentionParams p{};
    p.q = q.bytes.data();
    p.k = k.bytes.data();
    p.v = s.values_in_keys ? p.k : v.bytes.data();
    p.out = out.data();
    p.lse = lse.data();
    p.dtype = dtype;
    p.cache_dtype = dtype;
    p.batch_size = 1;
    p.seqlen_q = s.seqlen_q;
    p.seqlen_k = s.seqlen_k;
    p.nheads = s.nheads;
    p.nheads_k = s.nheads_k;
    p.headdim = s.headdim;
    p.headdim_v = s.headdim_v;
    p.q_stride_row = s.nheads * s.headdim;
    p.q_stride_head = s.headdim;
    p.k_stride_row = s.nheads_k * s.headdim;
    p.k_stride_head = s.headdim;
    p.v_stride_row = s.nheads_k * s.value_stride();
    p.v_stride_head = s.value_stride();
    p.out_stride_row = s.nheads * s.headdim_v;
    p.out_stride_head = s.headdim_v;
    p.lse_stride_head = s.seqlen_q;
    p.window_left = -1;
    p.window_right = s.window_right;
    p.num_threads = 2;
    p.softmax_scale = 1.0 / std::sqrt(static_cast<double>(s.headdim));
    return p;
}

// The largest error of one row, output and lse, against a plain loop in double.
double row_error(const Shape& s, int64_t dtype, const Tensor& q, const Tensor& k, const Tensor& v,
                 const std::vector<char>& out, const std::vector<float>& lse, int64_t i, int64_t head) {
    const int64_t kv_head = head / (s.nheads / s.nheads_k), size = dtype == FA_FLOAT32 ? 4 : 2;
    const int64_t end = s.window_right < 0 ? s.seqlen_k : i + s.seqlen_k - s.seqlen_q + s.window_right + 1;
    std::vector<double> weights;
    double sum = 0.0;
    for (int64_t j = 0; j < end && j < s.seqlen_k; ++j) {
        double score = 0.0;
        for (int64_t d = 0; d < s.headdim; ++d)
            score += q.values[(i * s.nheads + head) * s.headdim + d] * k.values[(j * s.nheads_k + kv_head) * s.headdim + d];
        weights.push_back(std::exp(score / std::sqrt(static_cast<double>(s.headdim))));
        sum += weights.back();
    }
    double error = sum > 0.0 ? std::abs(lse[head * s.seqlen_q + i] - std::log(sum)) : 0.0;
    for (int64_t c = 0; c < s.headdim_v; ++c) {
        double expected = 0.0;
        for (size_t j = 0; j < weights.size(); ++j)
            expected += weights[j] / sum * v.values[(j * s.nheads_k + kv_head) * s.value_stride() + c];
        error = std::fmax(error, std::abs(read(&out[((i * s.nheads + head) * s.headdim_v + c) * size], dtype) - expected));
    }
    return error;
}

double worst_error(int64_t isa, const Shape& s, int64_t dtype) {
    std::mt19937 generator(7);
    Tensor q = random_tensor(s.seqlen_q * s.nheads * s.headdim, dtype, generator);
    Tensor k = random_tensor(s.seqlen_k * s.nheads_k * s.headdim, dtype, generator);
    Tensor v = s.values_in_keys ? k : random_tensor(s.seqlen_k * s.nheads_k * s.headdim_v, dtype, generator);
    std::vector<char> out(s.seqlen_q * s.nheads * s.headdim_v * 4, '\xff');  // NaN until written
    std::vector<float> lse(s.nheads * s.seqlen_q, NAN);
    const FaAttentionParams params = make_params(s, dtype, q, k, v, out, lse);
    if (fastattention_forward(isa, &params, &params, params.num_threads) != 0) return INFINITY;
    double worst = 0.0;
    for (int64_t i = 0; i < s.seqlen_q; ++i)
        for (int64_t head = 0; head < s.nheads; ++head) {
            const double error = row_error(s, dtype, q, k, v, out, lse, i, head);
            if (!(error <= worst)) worst = error;  // also for NaN
        }
    return worst;
}

}  // namespace

int main() {
    const Shape shapes[] = {{1, 700, 8, 2, 64, 64, -1},  {70, 70, 2, 2, 59, 59, 0},         {100, 130, 3, 1, 128, 40, 0},
                            {5, 3, 1, 1, 16, 16, 0},     {33, 300, 4, 4, 80, 80, -1},       {1, 90, 3, 1, 300, 512, -1},
                            {20, 90, 2, 1, 576, 512, 0}, {1, 90, 16, 1, 576, 512, -1, true}};
    const double tolerances[] = {2e-5, 3e-2, 4e-3};  // float32, bfloat16, float16
    int checks = 0, failures = 0;
    for (int64_t isa = 0; isa < fastattention_num_isas(); ++isa)
        for (int64_t dtype = 0; dtype < 3; ++dtype) {
            double worst = 0.0;
            for (const Shape& shape : shapes) {
                const double error = worst_error(isa, shape, dtype);
                if (!(error <= worst)) worst = error;
            }
            const bool passes = worst <= tolerances[dtype];
            ++checks;
            failures += !passes;
            std::printf("%-12s dtype %d: largest error %.2e, allowed %.0e: %s\n", fastattention_isa_name(isa),
                        static_cast<int>(dtype), worst, tolerances[dtype], passes ? "PASS" : "FAIL");
        }
    std::printf("%d passed, %d failed\n", checks - failures, failures);
    return failures == 0 ? 0 : 1;
}
