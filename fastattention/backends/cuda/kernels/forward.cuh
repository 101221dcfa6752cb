// Attention forward of one tile of query rows of one head: the keys go by tile by tile through shared memory, and every warp
// works on rows of its own (warp_rows.cuh).
#pragma once

#include "key_loop.cuh"

namespace fastattention {

using Loop = KeyLoop<WholeCta>;

// Rows of the output pass through the memory of the queries, 16 bits each.
constexpr int kQueryBytes = Loop::kQueryBytes > kTileM* kOutPitch ? Loop::kQueryBytes : kTileM * kOutPitch;
constexpr int kSharedMemory = kQueryBytes + Loop::kTeamBytes;
static_assert(kSharedMemory == FA_SHARED_BYTES, "heuristics.py computes the same");

FA_DEVICE void forward_tile(const AttentionParams& p, const Work& work, const BasicTileRange<int>& mask) {
    const int first_row = work.m_tile * kTileM;
    const int last_row = smaller(first_row + kTileM, mask.seqlen_q) - 1;
    // No tile counts as full where a warp has no rows and may rest.
    const int full_end = first_row + kTileM - kWarpRows <= last_row ? mask.row_end(first_row) : 0;
    const KeyRange keys{mask.row_begin(first_row) / kTileN * kTileN, mask.row_end(last_row), kTileN, mask.row_begin(last_row),
                        full_end};
    const uint32_t shared = shared_memory();
    if (keys.begin < keys.end) {
        Loop loop(sources_of(p, work, mask.seqlen_q, keys.end), shared, shared + kQueryBytes, first_row, keys);
        WarpRows rows(p, work, mask, last_row);
        loop.run(rows);
        cta_barrier();
        rows.finish(shared);
        return;
    }
    WarpRows rows(p, work, mask, last_row);
    if (p.cache_seqlens != nullptr && !is_within_capacity(p, work.batch)) rows.set_nan();
    rows.finish(shared);
}

}  // namespace fastattention

extern "C" FA_KERNEL void FA_LAUNCH_BOUNDS(fastattention::kThreads, FA_MIN_CTAS)
    fastattention_forward(FA_PARAMETER fastattention::AttentionParams params) {
    using namespace fastattention;
    const Work work = find_work(params);
    const BasicTileRange<int> mask = mask_of(params, work.batch);
    if (work.m_tile * kTileM >= mask.seqlen_q) return;
    forward_tile(params, work, mask);
}
