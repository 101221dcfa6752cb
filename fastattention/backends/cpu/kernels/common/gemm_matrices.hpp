// The matrix product with instructions that multiply two rows by two columns: BFMMLA and SMMLA of Arm. Operands are those
// of vectors of pairs and quads. Two units, 64 bits, are what an instruction multiplies of a row and a column.
#pragma once

namespace FA_NAMESPACE {

template <class ElementType>
struct MatrixUnit : VectorUnit {
    using Element = ElementType;
    using Stored = float;
    static constexpr int kElements = 4 / sizeof(Element);
    static constexpr int kDepthStep = 2;
    FA_INLINE Vec pack(Vec first, Vec second) { return to_pairs(first, second); }
};
using MatrixPair = MatrixUnit<Bfloat16>;
using MatrixQuad = MatrixUnit<Int8>;

// Units of the depth whose columns are rearranged at a time: with kPanel columns they take 8 KB.
static constexpr int64_t kMatrixDepth = 128;

// Rearranges two units of all columns: a vector of `to` has two columns.
FA_INLINE void pair_columns(const float* b, int64_t b_stride, int64_t depth, int64_t columns, float* to) {
    for (int64_t k = 0; k < depth; k += 2)
        for (int64_t j = 0; j < columns; j += Vec::kWidth, to += 2 * Vec::kWidth)
            store_interleaved(to, load(b + k * b_stride + j), load(b + (k + 1) * b_stride + j));
}

// C += A B for kRows rows and kUsed vectors of columns. b: as pair_columns writes it.
template <class Element, int kUsed>
FA_INLINE void multiply_matrices_tile(const float* a, int64_t a_stride, const float* b, int64_t depth, bool accumulate,
                                      float* c, int64_t c_stride) {
    constexpr int kPairs = kRows / 2;
    Vec acc[kPairs][2 * kUsed];
#pragma GCC unroll 4
    for (int i = 0; i < kPairs; ++i)
#pragma GCC unroll 8
        for (int j = 0; j < 2 * kUsed; ++j) acc[i][j] = zero();
#pragma GCC unroll 2
    for (int64_t k = 0; k < depth; k += 2) {
        Vec rows[kPairs];
#pragma GCC unroll 4
        for (int i = 0; i < kPairs; ++i) rows[i] = load_halves(a + 2 * i * a_stride + k, a + (2 * i + 1) * a_stride + k);
#pragma GCC unroll 8
        for (int j = 0; j < 2 * kUsed; ++j, b += Vec::kWidth) {
            const Vec columns = load(b);
#pragma GCC unroll 4
            for (int i = 0; i < kPairs; ++i) acc[i][j] = multiply_matrices(acc[i][j], rows[i], columns, Element{});
        }
    }
    auto add = [&](float* at, Vec sum) __attribute__((always_inline)) {
        if (accumulate) sum = sizeof(Element) == 1 ? add_integers(sum, load(at)) : sum + load(at);
        store(at, sum);
    };
#pragma GCC unroll 4
    for (int i = 0; i < kPairs; ++i)
#pragma GCC unroll 4
        for (int j = 0; j < kUsed; ++j) {
            Vec first, second;
            pair_halves(acc[i][2 * j], acc[i][2 * j + 1], first, second);
            float* at = c + 2 * i * c_stride + j * Vec::kWidth;
            add(at, first);
            add(at + c_stride, second);
        }
}

template <class Element, int kUsed>
static void multiply_matrices_panel(const float* a, int64_t a_stride, const float* b, int64_t b_stride, int64_t depth,
                                    bool accumulate, float* c, int64_t c_stride, int64_t rows) {
    alignas(64) float paired[kMatrixDepth * kUsed * Vec::kWidth];
    for (int64_t k = 0; k < depth; k += kMatrixDepth) {
        const int64_t n = smaller(kMatrixDepth, depth - k);
        pair_columns(b + k * b_stride, b_stride, n, kUsed * Vec::kWidth, paired);
        for (int64_t i = 0; i < rows; i += kRows)
            multiply_matrices_tile<Element, kUsed>(a + i * a_stride + k, a_stride, paired, n, accumulate || k > 0,
                                                   c + i * c_stride, c_stride);
    }
}

template <bool kAccumulate, class Element>
static void multiply_panel(MatrixUnit<Element>, const float* a, int64_t a_stride, const float* b, int64_t b_stride,
                           int64_t depth, float* c, int64_t c_stride, int64_t rows, int64_t columns) {
    switch (columns / Vec::kWidth) {
        case 1: return multiply_matrices_panel<Element, 1>(a, a_stride, b, b_stride, depth, kAccumulate, c, c_stride, rows);
        case 2: return multiply_matrices_panel<Element, 2>(a, a_stride, b, b_stride, depth, kAccumulate, c, c_stride, rows);
        case 3: return multiply_matrices_panel<Element, 3>(a, a_stride, b, b_stride, depth, kAccumulate, c, c_stride, rows);
        case 4: return multiply_matrices_panel<Element, 4>(a, a_stride, b, b_stride, depth, kAccumulate, c, c_stride, rows);
    }
}

}  // namespace FA_NAMESPACE
