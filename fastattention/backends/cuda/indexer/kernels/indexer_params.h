// The arguments of key_scores.cuh and top_keys.cuh, which Python fills by name.
#pragma once

#include "integers.h"

namespace fastattention {

// Strides are in elements; last axes are contiguous. A launch has some neighbouring rows of q.
struct IndexerParams {
    const uint16_t* q;            // (total_q, nheads, headdim)
    const uint16_t* k;            // (k_rows, k_seqlen, headdim)
    const float* weights;         // (total_q, nheads)
    const int32_t* cu_seqlens_q;  // (batch_size + 1,), or null
    const int32_t* cu_seqlens_k;  // (batch_size + 1,), or null
    const int32_t* seqused_k;     // (batch_size,), or null
    const int32_t* block_table;   // (batch_size, max_blocks_per_seq), or null
    float* scores;                // (num_rows, scores_stride); anything for keys that a row does not see
    int32_t* indices;             // (total_q, topk)

    int64_t q_stride_row, q_stride_head;
    int64_t k_stride_batch, k_stride_row;
    int64_t weights_stride_row, block_table_stride, scores_stride;

    int32_t batch_size;
    int32_t seqlen_q;  // of every sequence, without cu_seqlens_q
    int32_t nheads;
    int32_t headdim;
    int32_t k_seqlen;      // tokens of a row of k, or of a page
    int32_t page_multiplier, page_shift;  // divide by k_seqlen; see Divisor
    int32_t most_keys;     // tokens that a sequence has, at most
    int32_t first_row, num_rows;
    int32_t row_tiles;     // CTAs of key_scores.cuh with different rows
    int32_t part_keys;     // keys of a CTA of key_scores.cuh, a multiple of its tiles
    int32_t topk;
    int32_t causal;
};

}  // namespace fastattention
