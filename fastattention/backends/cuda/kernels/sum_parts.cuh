// Adds up parts of one size in float32, in their order, and writes the sum once rounded to two places: where peers read it,
// and where the caller wants it. Four numbers a lane.
#pragma once

#include "columns.cuh"
#include "params.h"

namespace fastattention {

constexpr int kSumWarps = 8;  // of a CTA

// first: of four numbers, or of what is left of them
FA_DEVICE void sum_parts(const SumParams& p, int64_t first) {
    using Format = FormatOf<FA_FLOAT32_PARTS>::Type;
    using Item = Format::Item;
    const int64_t left = p.count - first;
    const int count = left < 4 ? static_cast<int>(left) : 4;
    Format::Four parts[kMostParts];
#pragma unroll
    for (int i = 0; i < kMostParts; ++i)
        parts[i] =
            i < p.num_parts ? Columns<Format>::read(static_cast<const Item*>(p.parts[i]) + first, count) : Format::Four{};
    float sum[4] = {};
#pragma unroll
    for (int i = 0; i < kMostParts; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[j] += Format::widen(Format::get(parts[i], j));
    const Format::Four four = Format::narrow(sum);
    Columns<Format>::write(static_cast<Item*>(p.shared) + first, count, four);
    Columns<Format>::write(static_cast<Item*>(p.out) + first, count, four);
}

}  // namespace fastattention

extern "C" FA_KERNEL void FA_LAUNCH_BOUNDS(fastattention::kSumWarps * 32, 1)
    fastattention_sum_parts(FA_PARAMETER fastattention::SumParams params) {
    using namespace fastattention;
    const int64_t first = ((cta_index() * kSumWarps + warp_index()) * 32 + lane_index()) * 4;
    if (first < params.count) sum_parts(params, first);
}
