// The instruction sets that the library was built for, and which of them this processor runs.
#pragma once

namespace fastattention {

struct Kernels;  // kernels.hpp

// The instructions with which kernels multiply int8.
enum class Int8Dot { kNone, kAvxVnni, kAvx512Vnni, kAmx, kDotProd, kI8mm };

// Number of instruction sets this processor runs; the last is the fastest.
int num_isas();
const Kernels& isa_kernels(int index);

// Whether this processor has these instructions; false for kNone.
bool has_int8_dot(Int8Dot dot);

}  // namespace fastattention
