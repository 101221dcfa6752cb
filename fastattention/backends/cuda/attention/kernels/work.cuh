// Finds which tile and head a CTA computes, how long its sequence is, and where its queries, keys and values lie.
#pragma once

#include "attention_variant.cuh"
#include "cache.cuh"
#include "shared_tile.cuh"

#define FA_HOST_DEVICE FA_DEVICE
#include "tile_range.hpp"

namespace fastattention {

FA_DEVICE int smaller(int a, int b) { return a < b ? a : b; }

// Rows of a warp: kSteps times those of a matrix instruction.
constexpr int kSteps = kTileM / (kRowWarps * Config::step_rows);
constexpr int kWarpRows = kSteps * Config::step_rows;
static_assert(kWarpRows * kRowWarps == kTileM, "warps must share the rows evenly");

// Which of the warps this is that share out the rows, and its first row among those of the CTA.
FA_DEVICE int row_warp() { return kRowWarps == 1 ? 0 : warp_index() / kColumnWarps; }
FA_DEVICE int first_warp_row() { return row_warp() * kWarpRows; }

// A tile of query rows of one head, or of all heads that share a key head (kGroupedRows). Then `head` is the first of them.
struct Work {
    int m_tile, head, kv_head, batch;
    int first_column;  // first column of v and out, or of a gradient
};

FA_DEVICE Divisor group_divisor(const AttentionParams& p) { return {p.group_size, p.group_multiplier, p.group_shift}; }

// CTAs start in the order of their index. CTAs of `heads_per_l2_wave` heads start together, so that their keys and values
// stay in the L2 cache. Among them the last tiles, which see the most keys under a causal mask, start first. The last
// heads, perhaps more, start together, so that their long tiles end when their short ones do.
FA_DEVICE Work find_work(const AttentionParams& p, int nheads) {
    const int64_t heads = static_cast<int64_t>(p.batch_size) * nheads;
    const int64_t tiles_together = static_cast<int64_t>(p.heads_per_l2_wave) * p.num_m_tiles;
    const int64_t index = cta_index() / kValueParts;
    const int64_t first_of_wave = index / tiles_together * p.heads_per_l2_wave;
    const bool is_last = first_of_wave >= p.heads_before_last_wave;
    const int64_t first_head = is_last ? p.heads_before_last_wave : first_of_wave;
    const int64_t heads_here = is_last ? heads - first_head : p.heads_per_l2_wave;
    const int64_t within = index - first_head * p.num_m_tiles;
    const int64_t index_of_head = first_head + within % heads_here;
    const int head = static_cast<int>(index_of_head % nheads);
    return {p.num_m_tiles - 1 - static_cast<int>(within / heads_here), head, group_divisor(p).quotient_of(head),
            static_cast<int>(index_of_head / nheads), static_cast<int>(cta_index() % kValueParts) * kHeaddimV};
}

// Tokens before a sequence when varlen. It is read where it is needed instead of kept in registers.
FA_DEVICE int64_t first_token(const int32_t* cu_seqlens, int batch) {
    return kGroupedRows || cu_seqlens == nullptr ? 0 : cu_seqlens[batch];
}

// The same among the tokens of all sequences, which lie one after the other when their lengths are equal too.
FA_DEVICE int64_t first_token_of_all(const int32_t* cu_seqlens, int batch, int seqlen) {
    return cu_seqlens == nullptr ? static_cast<int64_t>(batch) * seqlen : cu_seqlens[batch];
}

FA_DEVICE int seqlen_of(const int32_t* cu_seqlens, int batch, int seqlen) {
    return cu_seqlens == nullptr ? seqlen : cu_seqlens[batch + 1] - cu_seqlens[batch];
}

// Keys of a sequence in its cache after this call's append; 0 if the cache had no room for it.
FA_DEVICE int cached_keys(const AttentionParams& p, const CachedTokens& before) {
    return before.are_within_capacity(p) ? before.count + p.seqlen_new - before.pad : 0;
}

FA_DEVICE BasicTileRange<int> mask_of_cache(const AttentionParams& p, const CachedTokens& before) {
    return {p.seqlen_q, cached_keys(p, before), p.window_left, p.window_right};
}

// Grouped rows always attend to a cache.
FA_DEVICE BasicTileRange<int> mask_of(const AttentionParams& p, int batch) {
    if (kGroupedRows || p.cache_seqlens != nullptr) return mask_of_cache(p, CachedTokens(p, batch));
    return {seqlen_of(p.cu_seqlens_q, batch, p.seqlen_q), seqlen_of(p.cu_seqlens_k, batch, p.seqlen_k), p.window_left,
            p.window_right};
}

// The token of a query row.
FA_DEVICE int token_of(const AttentionParams& p, int row) {
    if constexpr (!kGroupedRows) return row;
    return p.seqlen_q == 1 ? 0 : group_divisor(p).quotient_of(row);
}
// Query rows of a key head in a decode.
FA_DEVICE int grouped_rows(const AttentionParams& p) { return p.seqlen_q * p.group_size; }
FA_DEVICE int head_of(const AttentionParams& p, const Work& w, int row) {
    return kGroupedRows ? w.head + row - token_of(p, row) * p.group_size : w.head;
}

FA_DEVICE SourceRows<uint16_t, kGroupedRows> query_rows(const AttentionParams& p, const Work& w, int num_rows) {
    const uint16_t* base =
        p.q + w.batch * p.q_stride_batch + first_token(p.cu_seqlens_q, w.batch) * p.q_stride_row + w.head * p.q_stride_head;
    if constexpr (kGroupedRows) {
        // The rows of a page are the heads of a token.
        return {base, static_cast<int>(p.q_stride_head), num_rows, p.headdim, nullptr, p.q_stride_row, group_divisor(p), 0};
    } else {
        return {base, p.q_stride_row, num_rows, p.headdim};
    }
}

// Keys or values, or their scales, up to key_end. Later rows of a tile are zeros.
template <class Item>
FA_DEVICE SourceRows<Item, kPaged> cache_rows(const AttentionParams& p, const Work& w, int key_end, const Item* base,
                                              int64_t stride_batch, int64_t stride_row, int64_t stride_head, int columns) {
    base += w.kv_head * stride_head;
    const int pad = leftpad_of(p, w.batch), step = static_cast<int>(stride_row);
    if constexpr (kPaged)
        return {base,
                step,
                key_end,
                columns,
                p.block_table + w.batch * p.block_table_stride,
                stride_batch,
                {p.page_block_size, p.page_multiplier, p.page_shift},
                pad};
    const int64_t row = p.cache_batch_idx == nullptr ? w.batch : p.cache_batch_idx[w.batch];
    base += row * stride_batch + (first_token(p.cu_seqlens_k, w.batch) + pad) * stride_row;
    return {base, step, key_end, columns};
}

FA_DEVICE SourceRows<CacheItem, kPaged> key_rows(const AttentionParams& p, const Work& w, int key_end) {
    return cache_rows(p, w, key_end, static_cast<const CacheItem*>(p.k), p.k_stride_batch, p.k_stride_row, p.k_stride_head,
                      p.headdim);
}

FA_DEVICE SourceRows<CacheItem, kPaged> value_rows(const AttentionParams& p, const Work& w, int key_end) {
    return cache_rows(p, w, key_end, static_cast<const CacheItem*>(p.v) + w.first_column, p.v_stride_batch, p.v_stride_row,
                      p.v_stride_head, p.headdim_v - w.first_column);
}

FA_DEVICE SourceRows<float, kPaged> key_scales(const AttentionParams& p, const Work& w, int key_end) {
    return cache_rows(p, w, key_end, p.k_scale, p.k_scale_stride_batch, p.k_scale_stride_row, p.k_scale_stride_head, 1);
}

FA_DEVICE SourceRows<float, kPaged> value_scales(const AttentionParams& p, const Work& w, int key_end) {
    return cache_rows(p, w, key_end, p.v_scale, p.v_scale_stride_batch, p.v_scale_stride_row, p.v_scale_stride_head, 1);
}

// The biases of a query head, a row for each query. base is null where they cannot be copied 16 bytes at a time.
FA_DEVICE SourceRows<uint16_t, false> bias_rows(const AttentionParams& p, int batch, int head, int num_rows) {
    const int64_t strides = p.bias_stride_batch | p.bias_stride_head | p.bias_stride_row | p.seqlen_k;
    const bool aligned = reinterpret_cast<int64_t>(p.attn_bias) % 16 == 0 && strides % 8 == 0;
    const bool fits = p.bias_stride_row == static_cast<int>(p.bias_stride_row);
    if (p.bias_is_float || p.bias_stride_key != 1 || !aligned || !fits) return {nullptr, 0, 0, 0};
    const int64_t first_row = first_token(p.cu_seqlens_q, batch) * p.bias_stride_row;
    const uint16_t* base =
        static_cast<const uint16_t*>(p.attn_bias) + batch * p.bias_stride_batch + head * p.bias_stride_head + first_row;
    return {base, static_cast<int>(p.bias_stride_row), num_rows, p.seqlen_k};
}

// The inputs of a tile of query rows.
struct Sources {
    SourceRows<uint16_t, kGroupedRows> q;
    SourceRows<CacheItem, kPaged> k, v;
    SourceRows<float, kPaged> k_scale, v_scale;  // only of a quantized cache
    SourceRows<uint16_t, false> bias;              // only where tiles of it pass through shared memory
};

FA_DEVICE Sources sources_of(const AttentionParams& p, const Work& w, int num_rows, int key_end) {
    Sources sources{query_rows(p, w, num_rows), key_rows(p, w, key_end), value_rows(p, w, key_end), {}, {}, {}};
    if constexpr (kQuantized) {
        sources.k_scale = key_scales(p, w, key_end);
        sources.v_scale = value_scales(p, w, key_end);
    }
    if constexpr (kStagesBias) sources.bias = bias_rows(p, w.batch, w.head, num_rows);
    return sources;
}

}  // namespace fastattention
