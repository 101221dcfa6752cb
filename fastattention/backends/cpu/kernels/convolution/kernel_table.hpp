// The tasks that convolution.cpp passes to the kernels of an instruction set, and the table of these kernels.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "convolution/params.h"

namespace fastattention {

// A task computes some neighbouring tokens and channels of one sequence.
struct ConvolutionTask {
    int64_t sequence;
    int64_t batch, first_token;  // the beginning of the sequence
    int64_t num_tokens;  // of the sequence
    int64_t begin, end;  // tokens of the task, counted from the beginning of the sequence
    int64_t first_channel, num_channels;
};

// Channels that a task has at most. Eleven rows of them in float32 and the filters fit an L1 cache of 48 KB.
constexpr int64_t kConvolutionChannels = 512;
// Floats of working memory that a task needs, for filters of any width: 17 rows in a backward.
constexpr int64_t kConvolutionScratch = 17 * kConvolutionChannels;

// The kernels of an instruction set.
struct ConvolutionKernels {
    void (*run)(const FaConvolutionParams& params, const ConvolutionTask& task, float* scratch);
    // sums: width + 1 rows of `channels` floats: gradients of weights and bias from the tokens of this task.
    void (*differentiate)(const FaConvolutionParams& params, const FaConvolutionGradients& gradients,
                          const ConvolutionTask& task, float* sums, float* scratch);
    // Adds up the sums of all token ranges, in their order, for the channels of a task.
    void (*write_parameter_gradients)(const FaConvolutionParams& params, const FaConvolutionGradients& gradients,
                                      const float* sums, int64_t num_ranges, int64_t first_channel, int64_t num_channels,
                                      float* scratch);
};

}  // namespace fastattention
