// Gradients of queries where rows are keys. Each CTA adds its keys' part to sums in memory, in any order; when all have,
// fastattention_round_queries turns sums into gradients. Sums lie as accumulators: kStepRows queries by 8 columns are a
// fragment, in which every lane has kElements floats.
#pragma once

#include "epilogue.cuh"
#include "params.h"
#include "work.cuh"

namespace fastattention {

// The sums of kStepRows queries of a head, from row kStepRows * step of its sequence on. A sequence may leave a step unused.
template <class Arch>
class QuerySums {
public:
    // Columns are a multiple of 8.
    FA_DEVICE QuerySums(const BackwardParams& params, int batch, int head, int step, int first_column) {
        const AttentionParams& p = params.call;
        const int64_t before = p.cu_seqlens_q == nullptr
                                   ? static_cast<int64_t>(batch) * ((p.seqlen_q + Arch::kStepRows - 1) / Arch::kStepRows)
                                   : p.cu_seqlens_q[batch] / Arch::kStepRows + batch;
        at_ = params.query_sums + (((before + step) * p.nheads + head) * kHeaddim + first_column) * Arch::kStepRows;
    }

    FA_DEVICE void add(int n, const float (&x)[Arch::kElements]) const {
        if constexpr (kAddsTogether) {
            add_global_128(own(n, 0), x);
        } else {
#pragma unroll
            for (int i = 0; i < Arch::kElements; ++i) add_global_32(own(n, i), x[i]);
        }
    }

    FA_DEVICE void read(int n, float (&x)[Arch::kElements]) const {
#pragma unroll
        for (int i = 0; i < Arch::kElements; ++i) x[i] = *own(n, i);
    }

private:
    // Where an addition takes one float, neighbouring lanes have neighbouring floats.
    static constexpr bool kAddsTogether = kAddsFour && Arch::kAsyncCopy && Arch::kElements == 4;

    FA_DEVICE float* own(int n, int i) const {
        const int at = kAddsTogether ? lane_index() * Arch::kElements + i : i * 32 + lane_index();
        return at_ + n * (Arch::kElements * 32) + at;
    }

    float* at_;
};

// Adds the product of a tile's gradients of scores with the CTA's keys, both in shared memory, to the sums of a head.
template <class Arch>
FA_DEVICE void add_to_queries(const BackwardParams& params, int batch, int head, int first_query, int num_queries,
                              uint32_t grads, uint32_t keys) {
    // Warps share out the product: parts of the queries, and columns of each part.
    constexpr int kQueryParts = Config::query_parts, kColumns = kHeaddim * kQueryParts / kWarps;
    constexpr int kQuerySteps = kTileN / (kQueryParts * Arch::kStepRows);
    static_assert(kQuerySteps * kQueryParts * Arch::kStepRows == kTileN && kColumns % 16 == 0, "warps share evenly");
    const int part = warp_index() % kQueryParts, first_column = warp_index() / kQueryParts * kColumns;
    float acc[kQuerySteps][kColumns / 8][Arch::kElements] = {};
    const typename Arch::template SharedColumns<kProbabilityPitch> rows(grads + part * (kTileN / kQueryParts) * 2);
    const typename Arch::template Values<kHeaddim> values(keys, first_column);
#pragma unroll
    for (int group = 0; group < kTileM / Arch::kKeyStep; ++group) values.accumulate(acc, rows, group);
#pragma unroll
    for (int step = 0; step < kQuerySteps; ++step) {
        const int first = first_query + (part * kQuerySteps + step) * Arch::kStepRows;
        if (first >= num_queries) return;
        const QuerySums<Arch> sums(params, batch, head, first / Arch::kStepRows, first_column);
#pragma unroll
        for (int n = 0; n < kColumns / 8; ++n) sums.add(n, acc[step][n]);
    }
}

// Each warp writes the gradients of kStepRows queries of a head.
template <class Arch>
FA_DEVICE void round_queries(const BackwardParams& params) {
    constexpr int kColumns = Config::rounded_columns, kPitch = pitch_of<2>(kColumns);
    const AttentionParams& p = params.call;
    const int steps = (p.seqlen_q + Arch::kStepRows - 1) / Arch::kStepRows;
    const int64_t index = cta_index() * kWarps + warp_index(), of_heads = index / steps;
    const int step = static_cast<int>(index - of_heads * steps), first = step * Arch::kStepRows;
    const int batch = static_cast<int>(of_heads / p.nheads), head = static_cast<int>(of_heads % p.nheads);
    if (batch >= p.batch_size) return;
    const int num_queries = seqlen_of(p.cu_seqlens_q, batch, p.seqlen_q);
    if (first >= num_queries) return;
    const uint32_t rows = shared_memory() + warp_index() * Arch::kStepRows * kPitch;
    const int64_t token = first_token_of_all(p.cu_seqlens_q, batch, p.seqlen_q) + first;
    const int64_t stride = static_cast<int64_t>(p.nheads) * p.headdim;  // gradients are contiguous
    uint16_t* const to = params.grad_q + token * stride + head * p.headdim;
#pragma unroll 1
    for (int column = 0; column < kHeaddim; column += kColumns) {
        float acc[1][kColumns / 8][Arch::kElements];
        const QuerySums<Arch> sums(params, batch, head, step, column);
#pragma unroll
        for (int n = 0; n < kColumns / 8; ++n) sums.read(n, acc[0][n]);
        leave_rows<Arch, kPitch>(acc, rows, 0, [&](int, int) { return p.softmax_scale; });
        warp_barrier();
        copy_rows<Arch::kStepRows, kColumns, kPitch>({to + column, stride, num_queries - first, p.headdim - column}, rows, 0);
        warp_barrier();
    }
}

}  // namespace fastattention
