// The arguments of the kernels of chunked linear attention, which Python fills by name. Strides are in elements.
#pragma once

#include "integers.h"

namespace fastattention {

// Scratch memory has a slot for every chunk of tokens (chunk.cuh); slots of a head are contiguous. A slot has
//
//     scores    (chunk, chunk)      weights of the chunk's own updates in its outputs
//     inverse   (chunk, chunk)      with the delta rule; for gradients also its transpose, turned_inverse
//     factors                       factors.cuh
//     q_scaled, k_scaled  (chunk, columns of a tile)    with a gate for every key dimension; with the delta rule,
//                                                       k_scaled has as many asking keys after these
//     states    (columns of v, columns of a tile)   before the chunk
//     updates   (columns of v / 8, chunk, 8)        with the delta rule
struct ChunkParams {
    const uint16_t* q;  // rows of q, k, v and out are aligned to 16 bytes
    const uint16_t* k;
    const uint16_t* v;
    const void* g;
    const void* beta;            // null for ones
    const float* initial_state;  // null for zeros
    const int32_t* cu_seqlens;   // null where sequences are rows of the batch
    const float* skip;           // (nheads,), how much of its value an output gets; null for zeros
    uint16_t* out;               // contiguous
    float* final_state;          // contiguous, null if not needed
    const uint16_t* dout;        // gradients of out, contiguous, for gradients of delta rules alone
    uint16_t* scores;
    uint16_t* inverse;
    uint16_t* turned_inverse;    // null if not needed
    float* factors;
    uint16_t* q_scaled;
    uint16_t* k_scaled;
    uint16_t* states;
    uint16_t* updates;

    int64_t q_stride_batch, q_stride_head;
    int64_t k_stride_batch, k_stride_head;
    int64_t v_stride_batch, v_stride_head;
    int64_t g_stride_batch, g_stride_row, g_stride_head;
    int64_t beta_stride_batch, beta_stride_row, beta_stride_head;
    int64_t state_stride_sequence, state_stride_head, state_stride_key;  // strides of the initial state

    int32_t q_stride_row, k_stride_row, v_stride_row;
    int32_t num_sequences, seqlen, num_slots;
    int32_t nheads, group_size;
    int32_t headdim_k, headdim_v;  // of states
    int32_t columns_k, columns_v;  // of rows of q and k, of v and out: multiples of 8, zeros beyond the headdim
    int32_t gate_format, beta_format;  // see dtype_code.h
    int32_t normalizes;            // queries and keys

    float scale;
};

// The arguments of token_gradients.cuh.
struct GradientParams {
    ChunkParams call;  // of the kernels before, without q_scaled, k_scaled, scores and inverse
    const uint16_t* state_gradients;   // as call.states, after the chunk
    const uint16_t* update_gradients;  // as call.updates, before beta multiplied these
    void* dq;  // (batch_size, seqlen, nheads, columns of q), floats if sums_heads, otherwise in 16 bits
    void* dk;  // likewise
    uint16_t* dv;  // as out, of delta rules
    float* dg;     // contiguous
    float* dbeta;  // contiguous, null without beta
    float* dskip;  // a number for each slot, null without skip
    int32_t sums_heads;  // dq and dk will be summed over heads
};

}  // namespace fastattention
