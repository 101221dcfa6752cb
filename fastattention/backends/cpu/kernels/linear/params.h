// The arguments of linear attention.
//
// Every field is eight bytes wide, so that the layout is the same for every compiler and for ctypes. Python reads the fields
// from this file. Pointers come first, because each call passes them separately from the rest.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// One call of linear attention, with the names of fastattention/linear/problem.py. out and final_state are contiguous.
typedef struct FaLinearParams {
    void* out;  // (batch_size, seqlen, nheads, headdim_v)
    float* final_state;  // (num_sequences, nheads, headdim_k, headdim_v), or null
    const void* q;  // (batch_size, seqlen, nheads_k, headdim_k)
    const void* k;
    const void* v;  // (batch_size, seqlen, nheads, headdim_v)
    const void* g;  // (batch_size, seqlen, nheads), or (..., nheads, headdim_k) when gate_per_key
    const void* beta;  // (batch_size, seqlen, nheads), or null for ones
    const float* initial_state;  // (num_sequences, nheads, headdim_k, headdim_v), or null
    const int32_t* cu_seqlens;  // (num_sequences + 1), or null
    const float* skip;  // (nheads), or null for zeros: how much of its value a token's output gets
    int64_t dtype, gate_dtype, beta_dtype;
    int64_t seqlen, num_sequences;  // seqlen: of each sequence, or of all together with cu_seqlens
    int64_t nheads, nheads_k, headdim_k, headdim_v;
    int64_t q_stride_batch, q_stride_row, q_stride_head;
    int64_t k_stride_batch, k_stride_row, k_stride_head;
    int64_t v_stride_batch, v_stride_row, v_stride_head;
    int64_t g_stride_batch, g_stride_row, g_stride_head;
    int64_t beta_stride_batch, beta_stride_row, beta_stride_head;
    int64_t state_stride_sequence, state_stride_head, state_stride_row;  // strides of initial_state
    int64_t gate_per_key, l2norm;
    int64_t overwrites;  // a delta rule: tokens replace what the state holds for their keys
    int64_t chunk;  // tokens of a chunk, a multiple of the row and depth steps of products; 0: token by token
    int64_t num_threads;
    double scale;
} FaLinearParams;

// The tensors of a backward, all contiguous: gradients of results, or null for zeros, and those that are computed. Gradients
// of queries and keys are in the dtype of q. Heads that share a key head are divided into num_parts parts; a part adds up its
// gradients of queries and keys in float.
typedef struct FaLinearGradients {
    const void* dout;  // (batch_size, seqlen, nheads, headdim_v), in the dtype of q
    const float* dfinal_state;  // (num_sequences, nheads, headdim_k, headdim_v)
    void* dq;  // (batch_size, seqlen, nheads_k, headdim_k); if heads share key heads, (num_parts, ...) of float
    void* dk;
    void* dv;  // (batch_size, seqlen, nheads, headdim_v), in the dtype of q
    float* dg;  // (batch_size, seqlen, nheads), or (..., nheads, headdim_k) when gate_per_key
    float* dbeta;  // (batch_size, seqlen, nheads), or null without beta
    float* dinitial_state;  // (num_sequences, nheads, headdim_k, headdim_v), or null
    float* dskip;  // (num_sequences, nheads), or null without skip
    int64_t num_parts;
} FaLinearGradients;

#ifdef __cplusplus
}
#endif
