// The tasks that linear.cpp passes to the kernels of an instruction set, and the table of these kernels.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "linear/params.h"

namespace fastattention {

// A task computes some value columns of consecutive heads of one sequence.
struct LinearTask {
    int64_t sequence, head, num_heads;
    int64_t batch, first_token;  // the beginning of the sequence
    int64_t num_tokens;
    int64_t first_column, num_columns;
};

// The kernels of an instruction set.
struct LinearKernels {
    // Computes a task, with working memory of scratch() floats.
    void (*run)(const FaLinearParams& params, const LinearTask& task, float* scratch);
    int64_t (*scratch)(const FaLinearParams& params, int64_t num_columns, int64_t num_heads);
    // Computes the gradients of a task with all columns, with working memory of backward_scratch() floats. part: of the heads
    // that share a key head.
    void (*backward)(const FaLinearParams& params, const FaLinearGradients& gradients, const LinearTask& task, int64_t part,
                     float* scratch);
    int64_t (*backward_scratch)(const FaLinearParams& params, int64_t num_tokens);
};

}  // namespace fastattention
