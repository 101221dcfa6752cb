// The table through which the library calls the kernels of an instruction set.
#pragma once

#include <cstdint>

#include "attention/kernel_table.hpp"
#include "common/isa.hpp"
#include "linear/kernel_table.hpp"

namespace fastattention {

struct Kernels {
    const char* name;
    Int8Dot int8_dot;  // which its processors may lack

    AttentionKernels attention;
    LinearKernels linear;

    // Loops that measure the limits of a core, see peaks.hpp; null where the instruction does not exist.
    double (*fma_loop)(int64_t iterations);  // returns the floating-point operations it did
    double (*bf16_dot_loop)(int64_t iterations);
    uint64_t (*read_loop)(const char* data, int64_t bytes);
};

}  // namespace fastattention
