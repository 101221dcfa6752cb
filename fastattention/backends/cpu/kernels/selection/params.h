// The arguments of the selection.
//
// Every field is eight bytes wide, so that the layout is the same for every compiler and for ctypes. Python reads the fields
// from this file. Pointers come first, because each call passes them separately from the rest.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// One call, with the names of fastattention/attention/selection/problem.py. Tensors are contiguous.
typedef struct FaSelectionParams {
    int32_t* slots;  // (total_q * heads, topk * key_block)
    int32_t* counts;  // (total_q * heads)
    const void* indices;  // (total_q, heads, topk)
    const int32_t* cu_seqlens_q;  // (batch_size + 1), or null
    const int32_t* cu_seqlens_k;  // (batch_size + 1), or null
    const int32_t* seqused_k;  // (batch_size), or null
    const int32_t* block_table;  // (batch_size, block_table_stride), or null
    int64_t dtype;  // of indices, FA_INT32 or FA_INT64
    int64_t total_q, heads, topk;
    int64_t batch_size, seqlen_q;  // seqlen_q: without cu_seqlens_q
    int64_t k_seqlen, block_table_stride;
    int64_t key_block, causal;
    int64_t row_step, token_step, head_step;
    int64_t num_threads;
} FaSelectionParams;

#ifdef __cplusplus
}
#endif
