// Which tile of which head a CTA computes, and where its queries, keys and values lie.
#pragma once

#include "params.h"
#include "shared_tile.cuh"

#define FA_HOST_DEVICE FA_DEVICE
#include "tile_range.hpp"

namespace fastattention {

// The tile of this CTA.
struct Work {
    int m_tile, head, batch;
    int first_column;  // of v and out
};

// CTAs start in the order of their index. Those of `heads_together` heads come together, so that their keys and values stay
// in the second-level cache, and among them the last tiles, which see the most keys under a causal mask, come first.
FA_DEVICE Work find_work(const ForwardParams& p) {
    const int64_t heads = static_cast<int64_t>(p.batch_size) * p.nheads;
    const int64_t tiles_together = static_cast<int64_t>(p.heads_together) * p.num_m_tiles;
    const int64_t index = block_index() / kValueParts;
    const int64_t group = index / tiles_together;
    const int64_t within = index - group * tiles_together;
    const int64_t first_head = group * p.heads_together;
    const int64_t heads_here = heads - first_head < p.heads_together ? heads - first_head : p.heads_together;
    const int64_t head = first_head + within % heads_here;
    return {p.num_m_tiles - 1 - static_cast<int>(within / heads_here), static_cast<int>(head % p.nheads),
            static_cast<int>(head / p.nheads), static_cast<int>(block_index() % kValueParts) * kHeaddimV};
}

// Tokens before a sequence when packed. Asked for where it is needed, rather than kept.
FA_DEVICE int64_t first_token(const int32_t* cu_seqlens, int batch) { return cu_seqlens == nullptr ? 0 : cu_seqlens[batch]; }

FA_DEVICE int seqlen_of(const int32_t* cu_seqlens, int batch, int seqlen) {
    return cu_seqlens == nullptr ? seqlen : cu_seqlens[batch + 1] - cu_seqlens[batch];
}

FA_DEVICE BasicTileRange<int> mask_of(const ForwardParams& p, int batch) {
    return {seqlen_of(p.cu_seqlens_q, batch, p.seqlen_q), seqlen_of(p.cu_seqlens_k, batch, p.seqlen_k), p.window_left,
            p.window_right};
}

FA_DEVICE SourceRows query_rows(const ForwardParams& p, const Work& w, int seqlen_q) {
    const uint16_t* base = p.q + w.batch * p.q_stride_batch + first_token(p.cu_seqlens_q, w.batch) * p.q_stride_row +
                           w.head * p.q_stride_head;
    return {base, p.q_stride_row, nullptr, 0, 0, seqlen_q, p.headdim};
}

// Keys or values up to key_end: a tile's rows beyond are zeros.
FA_DEVICE SourceRows cache_rows(const ForwardParams& p, const Work& w, int key_end, const uint16_t* base,
                                int64_t stride_batch, int stride_row, int64_t stride_head, int columns) {
    base += w.head / p.group_size * stride_head;
    if (kPaged && p.block_table != nullptr)
        return {base, stride_row, p.block_table + w.batch * p.block_table_stride, stride_batch, p.page_block_size, key_end,
                columns};
    base += w.batch * stride_batch + first_token(p.cu_seqlens_k, w.batch) * stride_row;
    return {base, stride_row, nullptr, 0, 0, key_end, columns};
}

}  // namespace fastattention
