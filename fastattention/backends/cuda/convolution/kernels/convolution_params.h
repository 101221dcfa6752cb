// The arguments of convolution.cuh and convolution_backward.cuh, which Python fills by name.
#pragma once

#include "integers.h"

namespace fastattention {

// Strides are in elements. The last axis of x is contiguous; weight and bias are.
struct ConvolutionParams {
    const void* x;              // (batch_size, seqlen, channels)
    const void* weight;         // (channels, width)
    const void* bias;           // (channels,); null for zeros
    const void* initial_state;  // (num_sequences, channels, state_len); null for zeros
    const int32_t* cu_seqlens;  // (num_sequences + 1,); null when sequences are rows of the batch
    void* out;                  // like x, contiguous
    void* final_state;          // like initial_state; null if not needed; in an update it is initial_state

    int64_t x_stride_batch, x_stride_token;
    int64_t initial_stride_sequence, initial_stride_channel, initial_stride_input;
    int64_t final_stride_sequence, final_stride_channel, final_stride_input;

    int32_t seqlen;  // of every row of the batch
    int32_t num_sequences;
    int32_t channels;
    int32_t state_len;
    int32_t channel_tiles;    // CTAs that share the channels
    int32_t range_tokens;     // neighbouring tokens of a sequence that a CTA computes, at most
    int32_t ranges_of_row;    // such ranges of a row of the batch; not used with cu_seqlens
    int32_t weight_dtype, bias_dtype, state_dtype;  // see dtype_code.h
    int32_t silu;
};

// Gradients are contiguous. Those that are not needed are null.
struct ConvolutionBackwardParams {
    ConvolutionParams call;       // as of the forward; out and final_state are not read
    const void* grad_out;         // null for zeros, as grad_final_state
    const void* grad_final_state;
    void* grad_x;
    void* grad_weight;
    void* grad_bias;
    void* grad_initial_state;
    float* sums;                  // (num_ranges, width + 1, channels): gradients of weights and bias from ranges of tokens
    int32_t num_ranges;
};

}  // namespace fastattention
