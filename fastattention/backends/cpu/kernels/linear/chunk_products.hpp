// Matrix products of a chunk: operands are floats in working memory, or become pairs of bfloat16 first.
#pragma once

namespace FA_NAMESPACE {

// One operand of a matrix product, in units.
struct Operand {
    const float* at;
    int64_t stride;
};

FA_INLINE Operand row_of(Operand a, int64_t row) { return {a.at + row * a.stride, a.stride}; }

// The name `load` belongs to tokens within classes of chunks.
FA_INLINE Vec load_vector(const float* from) { return load(from); }

// result (rows, columns) = or += a (rows, depth) b (depth, columns)
template <bool kAccumulate, class Unit>
FA_INLINE void multiply_operands(Operand a, Operand b, int64_t depth, float* result, int64_t stride, int64_t rows,
                                 int64_t columns) {
    for (int64_t j = 0; j < columns; j += kPanel)
        multiply_panel<kAccumulate>(Unit{}, a.at, a.stride, b.at + j, b.stride, depth / Unit::kElements, result + j, stride,
                                    rows, smaller(kPanel, columns - j));
}

template <class Unit>
class ChunkProducts {
protected:
    static constexpr bool kPairs = Unit::kElements == 2;
    static_assert(Unit::kElements <= 2);
    // Elements that the depth of a product is a multiple of.
    static constexpr int64_t kDepthStep = Unit::kElements * Unit::kDepthStep;

    // left, right: memory for pairs of operands A and B
    ChunkProducts(float* left, float* right) : left_(left), right_(right) {}

    // Floats of memory for operand A.
    static int64_t left_floats(int64_t rows, int64_t depth) { return kPairs ? rows * (depth / 2 + kRowPadding) : 0; }
    // Floats of memory for operand B, whose rows are `stride` apart.
    static int64_t right_floats(int64_t depth, int64_t stride) { return kPairs ? depth / 2 * stride : 0; }

    // Make operand A from `rows` rows of floats, and operand B from `depth` rows: in place, or in pairs of bfloat16.
    Operand left(const float* from, int64_t stride, int64_t rows, int64_t depth) const {
        if constexpr (!kPairs) return {from, stride};
        const int64_t units = depth / 2 + kRowPadding;
        for (int64_t i = 0; i < rows; ++i)
            narrow_row(from + i * stride, reinterpret_cast<Bfloat16*>(left_ + i * units), depth);
        return {left_, units};
    }
    Operand right(const float* from, int64_t stride, int64_t depth, int64_t columns) const {
        if constexpr (kPairs) {
            for (int64_t i = 0; i < depth; i += 2)
                for (int64_t c = 0; c < columns; c += Vec::kWidth)
                    store(right_ + i / 2 * stride + c,
                          Unit{}.pack(load_vector(from + i * stride + c), load_vector(from + (i + 1) * stride + c)));
            return {right_, stride};
        }
        return {from, stride};
    }
    float* const left_;
    float* const right_;
};

}  // namespace FA_NAMESPACE
