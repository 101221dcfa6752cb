// The arguments of attention and of its backward.
//
// Every field is eight bytes wide, so that the layout is the same for every compiler and for ctypes. Python reads the fields
// from this file. Pointers come first, because each call passes them separately from the rest.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// One attention call. Strides are in elements, sizes in elements or tokens; absent tensors are null.
typedef struct FaAttentionParams {
    void* out;        // shaped as q, with headdim_v
    float* lse;       // (batch_size, nheads, seqlen_q), varlen (nheads, total_q), or null
    const void* q;    // (batch_size, seqlen_q, nheads, headdim), varlen (total_q, nheads, headdim)
    void* k;          // (batch_size, seqlen_k, nheads_k, headdim), varlen, a cache, or pages; written when k_new is given
    void* v;          // shaped as k, with headdim_v
    const void* k_new;  // (batch_size, seqlen_new, nheads_k, headdim)
    const void* v_new;  // (batch_size, seqlen_new, nheads_k, headdim_v)
    const void* rotary_cos;  // (seqlen_rotary, rotary_dim / 2), contiguous
    const void* rotary_sin;
    const int32_t* cu_seqlens_q;     // (batch_size + 1)
    const int32_t* cu_seqlens_k;     // (batch_size + 1)
    const int32_t* cache_seqlens;    // (batch_size), before the append
    const int32_t* cache_batch_idx;  // (batch_size)
    const int32_t* cache_leftpad;    // (batch_size)
    const int32_t* block_table;      // (batch_size, max_blocks_per_seq)
    const float* alibi_slopes;       // (nheads) or (batch_size, nheads)
    const float* sinks;              // (nheads)
    const int64_t* dropout_seed;     // (1), or null
    const void* attn_bias;           // (batch_size, nheads, seqlen_q, seqlen_k), varlen (1, nheads, total_q, max_seqlen_k)
    const uint8_t* block_mask;       // (batch_size, nheads, blocks of queries, blocks of keys), 1 where kept, or null
    const int32_t* tile_index;  // (batch_size, nheads, tiles of queries, tiles of keys): -1, or a tile of tile_bits; or null
    const uint64_t* tile_bits;  // (tiles, 64): by query, a bit for each of 64 keys, 1 where visible
    float* k_scale;  // of a quantized cache, shaped as k without headdim; written when k_new is given
    float* v_scale;
    int64_t dtype;  // of q, k_new, v_new, out and the rotary tables
    int64_t cache_dtype;  // of k and v: dtype, or FA_INT8 or FA_FLOAT8 (e4m3) with scales
    int64_t bias_dtype;
    int64_t qk_dtype;  // of products of queries and keys: dtype, or FA_INT8
    int64_t batch_size, seqlen_q, seqlen_k, seqlen_new;
    int64_t nheads, nheads_k, headdim, headdim_v;
    int64_t page_block_size;  // 0 when k and v are not paged
    int64_t panel_size;  // tokens of a panel of a cache in panels (panel_cache.hpp); 0 when tokens are rows
    int64_t q_stride_batch, q_stride_row, q_stride_head;
    int64_t k_stride_batch, k_stride_row, k_stride_head;  // batch: of a cache row or a page; row: 0 for a cache in panels
    int64_t v_stride_batch, v_stride_row, v_stride_head;
    int64_t out_stride_batch, out_stride_row, out_stride_head;
    int64_t lse_stride_batch, lse_stride_head;
    int64_t k_new_stride_batch, k_new_stride_row, k_new_stride_head;
    int64_t v_new_stride_batch, v_new_stride_row, v_new_stride_head;
    int64_t k_scale_stride_batch, k_scale_stride_row, k_scale_stride_head;
    int64_t v_scale_stride_batch, v_scale_stride_row, v_scale_stride_head;
    int64_t block_table_stride, alibi_stride_batch;
    int64_t bias_stride_batch, bias_stride_head, bias_stride_row, bias_stride_key;
    int64_t block_stride_batch, block_stride_head, block_stride_row, block_stride_key;
    int64_t tile_stride_batch, tile_stride_head, tile_stride_row, tile_stride_key;
    int64_t block_m, block_n;  // tokens of a block: queries, keys
    int64_t window_left, window_right;  // -1 unlimited
    int64_t rotary_dim, rotary_interleaved;
    int64_t num_splits;  // 0 chooses by the lengths
    int64_t num_threads;  // including the caller's
    double softmax_scale;
    double softcap;  // 0 is off
    double dropout_p;  // 0 is off, and then there is no seed
    int64_t dropout_threshold;  // `threshold` of backends/common/dropout.py
} FaAttentionParams;

// The tensors of a backward, all contiguous. Its FaAttentionParams are the forward's, with the resulting out and lse.
typedef struct FaGradients {
    const void* grad_out;  // shaped as out
    const float* grad_lse;  // shaped as lse, or null
    void* grad_q;  // shaped as q, in its dtype; null when not asked for, like the others
    void* grad_k;
    void* grad_v;
    float* grad_sinks;  // (nheads), or null
} FaGradients;

#ifdef __cplusplus
}
#endif
