#include "attention/sequences.hpp"

namespace fastattention {
namespace {

Rows cache_rows(const FaAttentionParams& p, void* base, int64_t stride_batch, int64_t stride_row, int64_t batch,
                int64_t element_size) {
    const int64_t pad = p.cache_leftpad ? p.cache_leftpad[batch] : 0;
    Rows rows{static_cast<char*>(base), stride_row * element_size, nullptr, 0, 0, 0};
    if (p.block_table != nullptr) {
        rows.pages = p.block_table + batch * p.block_table_stride;
        rows.page_size = p.page_block_size;
        rows.stride_page = stride_batch * element_size;
        rows.first = pad;
    } else if (p.cu_seqlens_k != nullptr) {
        rows.base += p.cu_seqlens_k[batch] * rows.stride_row;
    } else {
        const int64_t row = p.cache_batch_idx ? p.cache_batch_idx[batch] : batch;
        rows.base += row * stride_batch * element_size + pad * rows.stride_row;
    }
    return rows;
}

}  // namespace

int64_t size_of(int64_t dtype) { return dtype == FA_FLOAT32 ? 4 : dtype == FA_INT8 || dtype == FA_FLOAT8 ? 1 : 2; }

KeyRange visible_keys(const TileRange& mask) {
    if (mask.seqlen_q == 0) return {0, 0};
    return {mask.row_begin(0), mask.row_end(mask.seqlen_q - 1)};
}

Call make_call(const FaAttentionParams& p) {
    return {&p, p.nheads / p.nheads_k, size_of(p.dtype), size_of(p.cache_dtype), nullptr};
}

Sequence make_sequence(const Call& call, int64_t batch) {
    const FaAttentionParams& p = *call.params;
    const int64_t element_size = call.element_size;
    Sequence s{};
    s.batch = batch;
    int64_t seqlen_q = p.seqlen_q, seqlen_k = p.seqlen_k, first_q = 0;
    if (p.cu_seqlens_q != nullptr) {
        first_q = p.cu_seqlens_q[batch];
        seqlen_q = p.cu_seqlens_q[batch + 1] - first_q;
        seqlen_k = p.cu_seqlens_k[batch + 1] - p.cu_seqlens_k[batch];
    }
    if (p.cache_seqlens != nullptr) {
        s.cache_seqlen = p.cache_seqlens[batch];
        seqlen_k = s.cache_seqlen + p.seqlen_new - (p.cache_leftpad ? p.cache_leftpad[batch] : 0);
    }
    s.mask = {seqlen_q, seqlen_k, p.window_left, p.window_right};
    s.q = static_cast<const char*>(p.q) + (batch * p.q_stride_batch + first_q * p.q_stride_row) * element_size;
    s.out = static_cast<char*>(p.out) + (batch * p.out_stride_batch + first_q * p.out_stride_row) * element_size;
    s.k = cache_rows(p, p.k, p.k_stride_batch, p.k_stride_row, batch, call.cache_element_size);
    s.v = cache_rows(p, p.v, p.v_stride_batch, p.v_stride_row, batch, call.cache_element_size);
    if (is_quantized(p)) {
        s.k_scale = cache_rows(p, p.k_scale, p.k_scale_stride_batch, p.k_scale_stride_row, batch, sizeof(float));
        s.v_scale = cache_rows(p, p.v_scale, p.v_scale_stride_batch, p.v_scale_stride_row, batch, sizeof(float));
    }
    if (p.lse != nullptr) s.lse = p.lse + batch * p.lse_stride_batch + first_q;
    if (p.alibi_slopes != nullptr) s.alibi = p.alibi_slopes + batch * p.alibi_stride_batch;
    if (p.block_mask != nullptr) s.blocks = p.block_mask + batch * p.block_stride_batch;
    if (p.tile_index != nullptr) s.tiles = p.tile_index + batch * p.tile_stride_batch;
    if (p.attn_bias != nullptr) {
        const int64_t size = size_of(p.bias_dtype);
        s.bias = static_cast<const char*>(p.attn_bias) + (batch * p.bias_stride_batch + first_q * p.bias_stride_row) * size;
    }
    return s;
}

}  // namespace fastattention
