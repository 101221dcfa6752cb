// Collectives of a warp: shuffles, loads of matrices, products of matrices. Layouts are those of the PTX ISA.
#pragma once

#include <cstdint>

#include "machine.hpp"

#pragma GCC visibility push(hidden)

namespace emulator {

std::uint32_t shuffle(std::uint32_t x, int from_lane);
bool any_lane(bool x);
void warp_barrier();

void load_matrices(std::uint32_t (&x)[4], std::uint32_t address);
void load_matrices_transposed(std::uint32_t (&x)[4], std::uint32_t address);

// c += a b in float, element by element in the order of k.
void mma_m16n8k8_float16(float* c, const std::uint32_t* a, const std::uint32_t* b);
void mma_m16n8k16_float16(float* c, const std::uint32_t* a, const std::uint32_t* b);
void mma_m16n8k16_bfloat16(float* c, const std::uint32_t* a, const std::uint32_t* b);
void mma_m16n8k32_int8(float* c, const std::uint32_t* a, const std::uint32_t* b);
void mma_m8n8k16_int8(float* c, const std::uint32_t* a, const std::uint32_t* b);
void mma_m8n8k4_row_col(float* c, const std::uint32_t* a, const std::uint32_t* b);
void mma_m8n8k4_row_row(float* c, const std::uint32_t* a, const std::uint32_t* b);

// The wavefronts of all load_matrices so far.
extern Wavefronts matrix_wavefronts;

}  // namespace emulator

#pragma GCC visibility pop
