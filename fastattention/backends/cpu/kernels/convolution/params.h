// The arguments of the causal convolution.
//
// Every field is eight bytes wide, so that the layout is the same for every compiler and for ctypes. Python reads the fields
// from this file. Pointers come first, because each call passes them separately from the rest.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// One call, with the names of fastattention/convolution/problem.py. Strides are in elements.
typedef struct FaConvolutionParams {
    void* out;  // (batch_size, seqlen, channels), contiguous
    void* final_state;  // (num_sequences, channels, state_len), or null; in an update it is initial_state
    const void* x;  // (batch_size, seqlen, channels), the last axis contiguous
    const void* weight;  // (channels, width), contiguous
    const void* bias;  // (channels), or null
    const void* initial_state;  // (num_sequences, channels, state_len), or null
    const int32_t* cu_seqlens;  // (num_sequences + 1), or null
    int64_t dtype, weight_dtype, bias_dtype, state_dtype;  // state_dtype: that of x, or FA_FLOAT32
    int64_t seqlen, num_sequences;  // seqlen: of each sequence, or of all together with cu_seqlens
    int64_t channels, width, state_len;
    int64_t x_stride_batch, x_stride_row;
    int64_t initial_stride_sequence, initial_stride_channel, initial_stride_input;  // of initial_state
    int64_t final_stride_sequence, final_stride_channel, final_stride_input;  // of final_state
    int64_t silu, updates;
    int64_t num_threads;
} FaConvolutionParams;

// The gradients of a call: those of its results, and where to write those of its tensors. All are contiguous.
typedef struct FaConvolutionGradients {
    const void* grad_out;
    const void* grad_final_state;  // or null
    void* grad_x;  // each of these is null where nobody needs it
    void* grad_weight;
    void* grad_bias;
    void* grad_initial_state;
} FaConvolutionGradients;

#ifdef __cplusplus
}
#endif
