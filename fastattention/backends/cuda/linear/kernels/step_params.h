// The arguments of step.cuh, which Python fills by name.
#pragma once

#include "integers.h"

namespace fastattention {

// Strides are in elements. The last axis of every tensor is contiguous.
struct StepParams {
    const void* q;               // (batch_size, seqlen, nheads / group_size, headdim_k), like k
    const void* k;
    const void* v;               // (batch_size, seqlen, nheads, headdim_v)
    const void* g;               // (batch_size, seqlen, nheads, headdim_k), or without its last axis
    const void* beta;            // (batch_size, seqlen, nheads); null for ones
    const float* initial_state;  // (num_sequences, nheads, headdim_k, headdim_v); null for zeros
    const int32_t* cu_seqlens;   // (num_sequences + 1,); null when sequences are rows of the batch
    const float* skip;           // (nheads,), how much of its value an output gets; null for zeros
    void* out;                   // like v, contiguous
    float* final_state;          // like initial_state, contiguous; null if not needed

    int64_t q_stride_batch, q_stride_token, q_stride_head;
    int64_t k_stride_batch, k_stride_token, k_stride_head;
    int64_t v_stride_batch, v_stride_token, v_stride_head;
    int64_t g_stride_batch, g_stride_token, g_stride_head;
    int64_t beta_stride_batch, beta_stride_token, beta_stride_head;
    int64_t initial_stride_sequence, initial_stride_head, initial_stride_row;

    int32_t seqlen;  // of every row of the batch
    int32_t nheads;
    int32_t group_size;  // heads of v that share a head of q and k
    int32_t headdim_k, headdim_v;
    int32_t column_tiles;  // CTAs that share the columns of a head
    int32_t g_format, beta_format;  // see dtype_code.h
    int32_t l2norm;
    int32_t overwrites;  // the delta rule
    float scale;
};

}  // namespace fastattention
