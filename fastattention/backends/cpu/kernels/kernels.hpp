// The table through which the library calls the kernels of an instruction set.
#pragma once

#include <cstdint>

#include "attention/kernel_table.hpp"
#include "common/isa.hpp"
#include "convolution/kernel_table.hpp"
#include "indexer/kernel_table.hpp"
#include "linear/kernel_table.hpp"

namespace fastattention {

struct Kernels {
    const char* name;
    Int8Dot int8_dot;  // its int8 instructions, which the processor may lack

    AttentionKernels attention;
    LinearKernels linear;
    ConvolutionKernels convolution;
    IndexerKernels indexer;

    // Loops that measure the limits of a core, see peaks.hpp; null if the instruction does not exist.
    double (*fma_loop)(int64_t iterations);  // returns the number of floating-point operations
    double (*bf16_dot_loop)(int64_t iterations);
    uint64_t (*read_loop)(const char* data, int64_t bytes);
};

}  // namespace fastattention
