// The matrix product of both halves of attention: C = A B or C += A B, on operands of 32-bit units.
//
// A is (rows, depth), row-major; B is (depth, columns), row-major; C is float. A unit is one float, or a pair of bfloat16
// that one instruction multiplies and adds. Both arrive as float*: broadcasts and loads only move bits.
#pragma once

namespace FA_NAMESPACE {

// What a unit says of itself:
//   kElements   elements it holds
//   kRowStep    rows of A and C come in multiples of this
//   kDepthStep  so does the depth
//   begin, end  called by a thread around a sequence of products
// Register tile: with six rows, the accumulators, one vector of A and kVectors of B fill the registers.
static constexpr int kRows = 6;
static constexpr int kVectors = Vec::kRegisters == 32 ? 4 : 2;
static constexpr int kPanel = kVectors * Vec::kWidth;

struct VectorUnit {
    static constexpr int kRowStep = kRows;
    static constexpr int kDepthStep = 1;
    FA_INLINE void begin() {}
    FA_INLINE void end() {}
};

struct FloatUnit : VectorUnit {
    static constexpr int kElements = 1;
    FA_INLINE Vec multiply_add(Vec acc, Vec a, Vec b) { return fma(a, b, acc); }
};

#ifdef FA_HAS_BF16_DOT
struct Bfloat16Pair : VectorUnit {
    static constexpr int kElements = 2;
    FA_INLINE Vec multiply_add(Vec acc, Vec a, Vec b) { return dot_pairs(acc, a, b); }
};
#endif

template <class Unit, int kUsed, bool kAccumulate>
FA_INLINE void multiply_tile(const float* a, int64_t a_stride, const float* b, int64_t b_stride, int64_t depth, float* c,
                             int64_t c_stride) {
    Vec acc[kRows][kUsed];
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 8
        for (int j = 0; j < kUsed; ++j) acc[i][j] = kAccumulate ? load(c + i * c_stride + j * Vec::kWidth) : zero();
    for (int64_t k = 0; k < depth; ++k) {
        Vec columns[kUsed];
#pragma GCC unroll 8
        for (int j = 0; j < kUsed; ++j) columns[j] = load(b + k * b_stride + j * Vec::kWidth);
#pragma GCC unroll 8
        for (int i = 0; i < kRows; ++i) {
            const Vec row = broadcast(a[i * a_stride + k]);
#pragma GCC unroll 8
            for (int j = 0; j < kUsed; ++j) acc[i][j] = Unit::multiply_add(acc[i][j], row, columns[j]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 8
        for (int j = 0; j < kUsed; ++j) store(c + i * c_stride + j * Vec::kWidth, acc[i][j]);
}

template <class Unit, int kUsed, bool kAccumulate>
FA_INLINE void multiply_rows(const float* a, int64_t a_stride, const float* b, int64_t b_stride, int64_t depth, float* c,
                             int64_t c_stride, int64_t rows) {
    for (int64_t i = 0; i < rows; i += kRows)
        multiply_tile<Unit, kUsed, kAccumulate>(a + i * a_stride, a_stride, b, b_stride, depth, c + i * c_stride, c_stride);
}

// rows: a multiple of Unit::kRowStep; columns: a multiple of the vector width, up to kPanel.
template <bool kAccumulate, class Unit>
static void multiply_panel(Unit, const float* a, int64_t a_stride, const float* b, int64_t b_stride, int64_t depth, float* c,
                           int64_t c_stride, int64_t rows, int64_t columns) {
    switch (columns / Vec::kWidth) {
        case 1: return multiply_rows<Unit, 1, kAccumulate>(a, a_stride, b, b_stride, depth, c, c_stride, rows);
        case 2: return multiply_rows<Unit, 2, kAccumulate>(a, a_stride, b, b_stride, depth, c, c_stride, rows);
        case 3: return multiply_rows<Unit, kVectors < 3 ? 1 : 3, kAccumulate>(a, a_stride, b, b_stride, depth, c, c_stride, rows);
        case 4: return multiply_rows<Unit, kVectors, kAccumulate>(a, a_stride, b, b_stride, depth, c, c_stride, rows);
    }
}

}  // namespace FA_NAMESPACE
