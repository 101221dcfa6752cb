// What a chunk has one number of for each token: gates, betas, and inverses of lengths of queries and keys.
#pragma once

#include "any_dtype.cuh"
#include "chunk.cuh"
#include "gates.cuh"
#include "lanes.cuh"
#include "numbers_in_shared.cuh"
#include "shared_tile.cuh"

namespace fastattention {

// The gate and beta of a thread's token. Padding tokens leave the state unchanged.
class TokenScalars {
public:
    // They are in memory until somebody asks for them.
    FA_DEVICE TokenScalars(const ChunkParams& p, const Sequence& sequence, int chunk, int head)
        : p_(p), has_token_(thread_index() < kChunk && chunk * kChunk + thread_index() < sequence.length) {
        if (!has_token_) return;
        const int64_t token = chunk * kChunk + thread_index();
        if (!Config::gate_per_key) {
            const int64_t gates = sequence.offset(p.g_stride_batch, p.g_stride_row, p.g_stride_head, head);
            gate_ = read_bits(p.g, gates + token * p.g_stride_row, p.gate_format);
        }
        if (p.beta != nullptr) {
            const int64_t betas = sequence.offset(p.beta_stride_batch, p.beta_stride_row, p.beta_stride_head, head);
            beta_ = read_bits(p.beta, betas + token * p.beta_stride_row, p.beta_format);
        }
    }

    FA_DEVICE float gate() const { return has_token_ ? exp2_approximate(widen_bits(gate_, p_.gate_format) * kLog2E) : 1.0f; }
    FA_DEVICE float beta() const { return p_.beta == nullptr ? 1.0f : has_token_ ? widen_bits(beta_, p_.beta_format) : 0.0f; }

private:
    const ChunkParams& p_;
    const bool has_token_;
    uint32_t gate_ = 0, beta_ = 0;
};

// Computes the inverses of lengths of kRows rows in shared memory; eight lanes share a row. For a row of zeros any factor
// will do, and 0 keeps products with the factor from overflowing.
template <int kRows>
FA_DEVICE void find_lengths(uint32_t rows, uint32_t to) {
    constexpr int kAtOnce = 4 * kWarps, kRowSteps = kRows / kAtOnce;  // a warp has four rows per step
    static_assert(kRows % kAtOnce == 0, "all warps have rows");
    float sums[kRowSteps] = {};
    const int first = warp_index() * 4 + lane_index() / 8;
#pragma unroll
    for (int step = 0; step < kRowSteps; ++step) {
        const uint32_t row = rows + (first + step * kAtOnce) * pitch_of<2>(kHeaddim) + lane_index() % 8 * 16;
#pragma unroll
        for (int column = 0; column < kHeaddim; column += 64) {
            const Words4 words = load_shared_128(row + column * 2);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const float x = Element::widen(static_cast<uint16_t>(words.word[i / 2] >> i % 2 * 16));
                sums[step] += x * x;
            }
        }
    }
#pragma unroll
    for (int step = 0; step < kRowSteps; ++step) sums[step] = sum_of_lanes<8>(sums[step]);
    if (lane_index() % 8 != 0) return;
#pragma unroll
    for (int step = 0; step < kRowSteps; ++step) {
        const float sum = sums[step];
        store_number(to + (first + step * kAtOnce) * 4,
                     sum == 0.0f ? 0.0f : exp2_approximate(-0.5f * log2_approximate(sum + kLengthEpsilon)));
    }
}

}  // namespace fastattention
