// The argument of every kernel, passed by value. Mirrored field by field in ../params.py; a test holds the two together.
// Pointers are to device memory. Strides are in elements, never bytes.
#pragma once

#include "integers.h"

namespace fastattention {

struct ForwardParams {
    const uint16_t* q;  // (batch_size, seqlen_q, nheads, headdim), or (total_q, nheads, headdim) when packed
    const uint16_t* k;  // (batch_size, seqlen_k, nheads_k, headdim), packed, or pages of page_block_size tokens
    const uint16_t* v;
    uint16_t* out;      // as q, with headdim_v
    float* lse;         // (batch_size, nheads, seqlen_q), or (nheads, total_q) when packed; null when not asked for

    const int32_t* cu_seqlens_q;  // (batch_size + 1), null when sequences are equally long
    const int32_t* cu_seqlens_k;
    const int32_t* block_table;   // (batch_size, pages of a sequence), null when not paged
    const float* alibi_slopes;    // null without
    const float* sinks;           // (nheads), null without
    const void* attn_bias;        // null without

    int64_t q_stride_batch, q_stride_head;
    int64_t k_stride_batch, k_stride_head;  // when paged, stride_batch is a page's
    int64_t v_stride_batch, v_stride_head;
    int64_t out_stride_batch, out_stride_head;
    int64_t lse_stride_batch, lse_stride_head;
    int64_t bias_stride_batch, bias_stride_head, bias_stride_row, bias_stride_key;
    int64_t alibi_stride_batch;
    int64_t block_table_stride;

    int32_t q_stride_row, k_stride_row, v_stride_row, out_stride_row;
    int32_t batch_size;
    int32_t seqlen_q, seqlen_k;  // of every sequence, or the longest when packed
    int32_t nheads;
    int32_t group_size;  // query heads that share a key head
    int32_t headdim, headdim_v;
    int32_t page_block_size;
    int32_t window_left, window_right;  // keys visible on either side of the diagonal, -1 unlimited
    int32_t bias_is_float;              // otherwise it has the dtype of q
    int32_t num_m_tiles;                // of the longest sequence
    int32_t heads_together;             // heads whose tiles run at about the same time, see find_work
    float softmax_scale;
    float softcap;  // 0 is off
};

}  // namespace fastattention
