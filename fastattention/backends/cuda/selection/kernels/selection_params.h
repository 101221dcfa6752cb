// The arguments of select_slots.cuh, which Python fills by name.
#pragma once

#include "integers.h"

namespace fastattention {

// The names are those of fastattention/attention/selection/problem.py. Tensors are contiguous.
struct SelectionParams {
    int32_t* slots;               // (num_sets, width)
    int32_t* counts;              // (num_sets,)
    const void* indices;          // (total_q, heads, topk), int32 or int64
    const int32_t* cu_seqlens_q;  // (batch_size + 1,), or null
    const int32_t* cu_seqlens_k;  // (batch_size + 1,), or null
    const int32_t* seqused_k;     // (batch_size,), or null
    const int32_t* block_table;   // (batch_size, block_table_stride), or null

    int64_t row_step, token_step, head_step, block_table_stride;

    int32_t heads, topk, width;
    int32_t batch_size;
    int32_t seqlen_q;   // of every sequence, without cu_seqlens_q
    int32_t k_seqlen;   // tokens of a row of keys, or of a page
    int32_t page_multiplier, page_shift;            // divide by k_seqlen; see Divisor
    int32_t most_keys;  // tokens that a sequence has, at most
    int32_t key_block;
    int32_t key_block_multiplier, key_block_shift;  // divide by key_block
    int32_t causal;
};

}  // namespace fastattention
