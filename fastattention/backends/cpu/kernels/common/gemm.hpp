// The matrix product of all families: C = A B or C += A B, on operands of 32-bit units.
//
// A is (rows, depth), row-major; B is (depth, columns), row-major; C is float. A unit is one float, or a pair of bfloat16 or
// a quad of int8 that one instruction multiplies and adds. All are passed as float*, as broadcasts and loads only move bits.
// C of quads is int32 in the memory of floats. B may also be stored in other units, which a load turns into one or two units.
#pragma once

namespace FA_NAMESPACE {

// The members of a unit:
//   kElements   elements per unit of A
//   kOffset     added to elements of A, whose instruction takes unsigned ones; sums begin with a row before B that undoes it
//   kRowStep    rows of A and C are multiples of this
//   kDepthStep  the depth is a multiple of this
//   begin, end  called by a thread before and after a sequence of products
//   Stored      a unit of B in memory
//   kOperands   units of A for one unit of B
//   start       the initial value of a vector of sums
//   load_units  loads a vector of units of B as kOperands operands
//   multiply_add  adds the products of a vector of B with a unit of A, which is in all lanes of a vector, or a Lane
//   pack        packs two vectors of elements to a vector of units
// Register tile: with six rows, the accumulators, one vector of A and kVectors of B fill the registers.
static constexpr int kRows = 6;
static constexpr int kVectors = Vec::kRegisters == 32 ? 4 : 2;
static constexpr int kPanel = kVectors * Vec::kWidth;

struct VectorUnit {
    static constexpr int kRowStep = kRows;
    static constexpr int kDepthStep = 1;
    static constexpr int kOffset = 0;
    FA_INLINE void begin() {}
    FA_INLINE void end() {}
    FA_INLINE Vec start(const void*, int64_t) { return zero(); }
};

// Whether a product of two tiles is one instruction, which is kept in registers until it is stored.
template <class Unit>
constexpr bool kMultipliesTiles = false;

// Elements that are multiplied as floats.
template <class Element>
struct WideUnit : VectorUnit {
    using Stored = Element;
    static constexpr int kElements = 1;
    static constexpr int kOperands = 1;
    FA_INLINE void load_units(const Stored* p, Vec* operands) { operands[0] = load(p); }
    template <class Row>
    FA_INLINE Vec multiply_add(Vec acc, Row a, Vec b) {
        return fma(a, b, acc);
    }
};
using FloatUnit = WideUnit<float>;

// Pairs of bfloat16 in memory that are multiplied as two floats.
struct WidePair : VectorUnit {
    using Stored = float;
    static constexpr int kElements = 1;
    static constexpr int kOperands = 2;
    FA_INLINE void load_units(const Stored* p, Vec* operands) { widen_pairs(load(p), operands[0], operands[1]); }
    template <class Row>
    FA_INLINE Vec multiply_add(Vec acc, Row a, Vec b) {
        return fma(a, b, acc);
    }
};

#ifdef FA_HAS_BF16_DOT
struct Bfloat16Pair : VectorUnit {
    using Stored = float;
    static constexpr int kElements = 2;
    static constexpr int kOperands = 1;
    FA_INLINE void load_units(const Stored* p, Vec* operands) { operands[0] = load(p); }
    template <class Row>
    FA_INLINE Vec multiply_add(Vec acc, Row a, Vec b) {
        return dot_pairs(acc, a, b);
    }
    FA_INLINE Vec pack(Vec first, Vec second) { return to_pairs(first, second); }
};
#endif

#ifdef FA_HAS_QUADS
struct Int8Quad : VectorUnit {
    using Stored = float;
    static constexpr int kElements = 4;
    static constexpr int kOffset = kQuadOffset;
    static constexpr int kOperands = 1;
    FA_INLINE Vec start(const Stored* b, int64_t b_stride) { return kOffset ? load(b - b_stride) : zero(); }
    FA_INLINE void load_units(const Stored* p, Vec* operands) { operands[0] = load(p); }
    template <class Row>
    FA_INLINE Vec multiply_add(Vec acc, Row a, Vec b) {
        return dot_quads(acc, a, b);
    }
};
#endif

// Prefetching while a product reads B: none, or of the memory `bytes` further on.
struct FetchNothing {
    FA_INLINE void fetch(const void*, int64_t) {}
};
struct FetchAhead {
    int64_t bytes;
    __attribute__((always_inline)) void fetch(const void* at, int64_t size) const {
        prefetch_bytes(static_cast<const char*>(at) + bytes, size);
    }
};

#ifdef FA_HAS_LANES
// Adds products with as many units of B as a vector of A has: those from lane kLane on. Vectors of A stay in registers, and
// those of B come one at a time.
template <class Unit, int kRowCount, int kUsed, class Fetch, int kLane = 0>
FA_INLINE void multiply_lanes(const Vec* rows, const typename Unit::Stored* b, int64_t b_stride, Vec (*acc)[kUsed],
                              Fetch ahead) {
    if constexpr (kLane < Vec::kWidth) {
        ahead.fetch(b, kUsed * Vec::kWidth * sizeof(*b));
#pragma GCC unroll 8
        for (int j = 0; j < kUsed; ++j) {
            Vec columns[Unit::kOperands];
            Unit::load_units(b + j * Vec::kWidth, columns);
#pragma GCC unroll 16
            for (int i = 0; i < kRowCount; ++i) {
                acc[i][j] = Unit::multiply_add(acc[i][j], Lane<kLane>{rows[i]}, columns[0]);
                if constexpr (Unit::kOperands == 2)
                    acc[i][j] = Unit::multiply_add(acc[i][j], Lane<kLane + 1>{rows[i]}, columns[1]);
            }
        }
        multiply_lanes<Unit, kRowCount, kUsed, Fetch, kLane + Unit::kOperands>(rows, b + b_stride, b_stride, acc, ahead);
    }
}
#endif

// Multiplies kRowCount rows of C, kUsed vectors wide.
template <class Unit, int kRowCount, int kUsed, bool kAccumulate, class Fetch = FetchNothing>
FA_INLINE void multiply_tile(const float* a, int64_t a_stride, const typename Unit::Stored* b, int64_t b_stride,
                             int64_t depth, float* c, int64_t c_stride, Fetch ahead = {}) {
    Vec acc[kRowCount][kUsed];
#pragma GCC unroll 16
    for (int i = 0; i < kRowCount; ++i)
#pragma GCC unroll 8
        for (int j = 0; j < kUsed; ++j) acc[i][j] = Unit::start(b + j * Vec::kWidth, b_stride);
    int64_t k = 0;
#ifdef FA_HAS_LANES
    constexpr int64_t kSteps = Vec::kWidth / Unit::kOperands;
    for (; k + kSteps <= depth; k += kSteps) {
        Vec rows[kRowCount];
#pragma GCC unroll 16
        for (int i = 0; i < kRowCount; ++i) rows[i] = load(a + i * a_stride + k * Unit::kOperands);
        multiply_lanes<Unit, kRowCount, kUsed>(rows, b + k * b_stride, b_stride, acc, ahead);
    }
#endif
    for (; k < depth; ++k) {
        const typename Unit::Stored* units = b + k * b_stride;
        ahead.fetch(units, kUsed * Vec::kWidth * sizeof(*units));
        Vec columns[kUsed][Unit::kOperands];
#pragma GCC unroll 8
        for (int j = 0; j < kUsed; ++j) Unit::load_units(units + j * Vec::kWidth, columns[j]);
#pragma GCC unroll 16
        for (int i = 0; i < kRowCount; ++i)
#pragma GCC unroll 2
            for (int o = 0; o < Unit::kOperands; ++o) {
                const Vec row = broadcast(a[i * a_stride + k * Unit::kOperands + o]);
#pragma GCC unroll 8
                for (int j = 0; j < kUsed; ++j) acc[i][j] = Unit::multiply_add(acc[i][j], row, columns[j][o]);
            }
    }
#pragma GCC unroll 16
    for (int i = 0; i < kRowCount; ++i)
#pragma GCC unroll 8
        for (int j = 0; j < kUsed; ++j) {
            float* at = c + i * c_stride + j * Vec::kWidth;
            // C is added at the end: sums of sums are more accurate than one long sum.
            store(at, kAccumulate ? acc[i][j] + load(at) : acc[i][j]);
        }
}

template <class Unit, int kUsed, bool kAccumulate>
FA_INLINE void multiply_rows(const float* a, int64_t a_stride, const float* b, int64_t b_stride, int64_t depth, float* c,
                             int64_t c_stride, int64_t rows) {
    for (int64_t i = 0; i < rows; i += kRows)
        multiply_tile<Unit, kRows, kUsed, kAccumulate>(a + i * a_stride, a_stride, b, b_stride, depth, c + i * c_stride,
                                                       c_stride);
}

// Multiplies by a panel of B. rows: a multiple of Unit::kRowStep; columns: a multiple of the vector width, up to kPanel.
template <bool kAccumulate, class Unit>
static void multiply_panel(Unit, const float* a, int64_t a_stride, const float* b, int64_t b_stride, int64_t depth, float* c,
                           int64_t c_stride, int64_t rows, int64_t columns) {
    switch (columns / Vec::kWidth) {
        case 1: return multiply_rows<Unit, 1, kAccumulate>(a, a_stride, b, b_stride, depth, c, c_stride, rows);
        case 2: return multiply_rows<Unit, 2, kAccumulate>(a, a_stride, b, b_stride, depth, c, c_stride, rows);
        case 3:
            return multiply_rows<Unit, (kVectors < 3 ? 1 : 3), kAccumulate>(a, a_stride, b, b_stride, depth, c, c_stride,
                                                                            rows);
        case 4: return multiply_rows<Unit, kVectors, kAccumulate>(a, a_stride, b, b_stride, depth, c, c_stride, rows);
    }
}

}  // namespace FA_NAMESPACE
