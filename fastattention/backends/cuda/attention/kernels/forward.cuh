// Attention forward of one tile of query rows of one head. Keys pass through shared memory tile by tile, and each warp
// processes rows of its own (warp_rows.cuh).
#pragma once

#include "key_loop.cuh"

namespace fastattention {

using Loop = KeyLoop<WholeCta>;

// Rows of the output, in 16 bits, are staged in the shared memory of the queries.
constexpr int kQueryBytes = Loop::kQueryBytes > kTileM* kOutPitch ? Loop::kQueryBytes : kTileM * kOutPitch;
static_assert(kQueryBytes + Loop::kTeamBytes + kExchangeBytes + TileWalk::kSharedBytes == Config::shared_bytes);

FA_DEVICE void forward_tile(const AttentionParams& p, const Work& work, const BasicTileRange<int>& mask) {
    const int first_row = work.m_tile * kTileM;
    const int last_row = smaller(first_row + kTileM, mask.seqlen_q) - 1;
    // No tile counts as full if a warp may skip it, because it has no rows or the block mask hides the tile from them.
    const bool any_rests = first_row + kTileM - kWarpRows > last_row || kMixesBlocks;
    const int full_end = any_rests ? 0 : mask.row_end(first_row);
    const FullKeys full{mask.row_begin(last_row), full_end};
    const int begin = mask.row_begin(first_row) / kTileN * kTileN, end = mask.row_end(last_row);
    const uint32_t shared = shared_memory(), list_shared = shared + Config::shared_bytes - TileWalk::kSharedBytes;
    const TileWalk tiles(p, {work.batch, work.head, false, first_row, last_row}, begin, end, list_shared);
    if (tiles.begin() < tiles.end()) {
        const uint32_t kv_shared = shared + kQueryBytes, exchange = kv_shared + Loop::kTeamBytes;
        Loop loop(sources_of(p, work, mask.seqlen_q, end), shared, kv_shared, exchange, first_row, tiles, full);
        WarpRows rows(p, work, mask, last_row);
        loop.run(rows);
        cta_barrier();
        rows.finish(shared);
        return;
    }
    WarpRows rows(p, work, mask, last_row);
    if (p.cache_seqlens != nullptr && !is_within_capacity(p, work.batch)) {
        rows.set_nan();
        report_length(p, work.batch);
    }
    rows.finish(shared);
}

// Rows after the last sequence of a varlen call see no keys. The CTAs of that sequence divide them among themselves.
FA_DEVICE void write_rows_behind(const AttentionParams& p, const Work& work) {
    const int64_t total_q = p.lse_stride_head;
    const int column = work.first_column + thread_index() * 8;
    const bool has_columns = thread_index() < kHeaddimV / 8 && column < p.headdim_v;
    for (int64_t row = p.cu_seqlens_q[p.batch_size] + work.m_tile; row < total_q; row += p.num_m_tiles) {
        if (has_columns)
            store_global_128(p.out + row * p.out_stride_row + work.head * p.out_stride_head + column, {0, 0, 0, 0});
        if (column == 0 && p.lse != nullptr)
            p.lse[work.head * p.lse_stride_head + row] = p.sinks == nullptr ? -infinity() : p.sinks[work.head];
    }
}

}  // namespace fastattention

extern "C" FA_KERNEL void FA_LAUNCH_BOUNDS(fastattention::kThreads, fastattention::Config::min_ctas)
    fastattention_forward(FA_PARAMETER fastattention::AttentionParams params) {
    using namespace fastattention;
    const Work work = find_work(params, params.nheads);
    if (params.cu_seqlens_q != nullptr && work.batch == params.batch_size - 1) write_rows_behind(params, work);
    const BasicTileRange<int> mask = mask_of(params, work.batch);
    if (work.m_tile * kTileM >= mask.seqlen_q) return;
    forward_tile(params, work, mask);
}
