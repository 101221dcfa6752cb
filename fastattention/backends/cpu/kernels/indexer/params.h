// The arguments of the indexer.
//
// Every field is eight bytes wide, so that the layout is the same for every compiler and for ctypes. Python reads the fields
// from this file. Pointers come first, because each call passes them separately from the rest.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// One call, with the names of fastattention/indexer/problem.py. Strides are in elements; last axes are contiguous.
typedef struct FaIndexerParams {
    int32_t* indices;  // (total_q, topk), contiguous
    const void* q;  // (total_q, nheads, headdim)
    const void* k;  // (k_rows, k_seqlen, headdim)
    const float* weights;  // (total_q, nheads)
    const int32_t* cu_seqlens_q;  // (batch_size + 1), or null
    const int32_t* cu_seqlens_k;  // (batch_size + 1), or null
    const int32_t* seqused_k;  // (batch_size), or null
    const int32_t* block_table;  // (batch_size, max_blocks_per_seq), or null
    int64_t dtype;  // of q and k
    int64_t total_q, batch_size, seqlen_q;  // seqlen_q: without cu_seqlens_q
    int64_t nheads, headdim, k_seqlen;
    int64_t q_stride_row, q_stride_head;
    int64_t k_stride_batch, k_stride_row;
    int64_t weights_stride_row;
    int64_t block_table_stride;
    int64_t topk, causal;
    int64_t num_threads;
} FaIndexerParams;

#ifdef __cplusplus
}
#endif
