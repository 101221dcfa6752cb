// Inverts I + L for the delta rule. L is strictly lower triangular, with a row and a column for every token of a chunk.
#pragma once

#include "chunk.cuh"
#include "numbers_in_shared.cuh"
#include "variant.cuh"

namespace fastattention {

// L and its inverse in shared memory, in floats. All threads of a CTA use it together.
//
// The inverse T of a triangle (L1, 0; L21, L2) is (T1, 0; -T2 L21 T1, T2). So parts on the diagonal are inverted first.
// Products join two of them to a triangle, and two triangles to the whole. L21 T1 is kept in unused memory of L above
// the diagonal meanwhile.
class Triangle {
public:
    // Eight lanes that read 16 bytes each of neighbouring rows are in different banks.
    static constexpr int kPitch = (kChunk + 4) * 4;
    static constexpr int kBytes = kChunk * kPitch;

    // system, inverse: addresses of kBytes each.
    FA_DEVICE Triangle(uint32_t system, uint32_t inverse) : system_(system), inverse_(inverse) {}

    // Stores an element of L. Others of four rows and columns on the diagonal are read too, but do not matter.
    FA_DEVICE void store(int row, int column, float x) const { store_number(system(row, column), x); }

    // Stores elements in `column` and the next column.
    FA_DEVICE void store_pair(int row, int column, float first, float second) const {
        const int odd = row % 2;  // neighbouring rows begin with different columns, in different banks
        store(row, column + odd, odd ? second : first);
        store(row, column + 1 - odd, odd ? first : second);
    }

    // Inverts I + L, which all threads have stored before a barrier. After the last barrier every thread may read it.
    FA_DEVICE void invert() const {
        if (warp_index() < kChunk / kTriangle) invert_triangle(warp_index() * kTriangle);
        cta_barrier();
        if constexpr (kChunk > kTriangle) {
            if (warp_index() < kTriangle / kPart) join_triangles(warp_index() * kPart);
            cta_barrier();
        }
    }

    // Writes the inverse less I, as operands, and its transpose if there is memory for it.
    FA_DEVICE void write(uint16_t* to, uint16_t* turned) const {
        for (int i = thread_index(); i < kChunk * (kChunk / 8); i += kThreads) {
            const int row = i / (kChunk / 8), column = i % (kChunk / 8) * 8;
            float x[8] = {};
            if (column < row)
#pragma unroll
                for (int four = 0; four < 8; four += 4) load_numbers(inverse(row, column + four), &x[four]);
            store_global_128(to + row * kChunk + column, packed(x, [&](int j) { return column + j < row; }));
            if (turned == nullptr) continue;
            if (row < column + 7)
#pragma unroll
                for (int j = 0; j < 8; ++j) x[j] = load_number(inverse(column + j, row));
            store_global_128(turned + row * kChunk + column, packed(x, [&](int j) { return row < column + j; }));
        }
    }

private:
    static constexpr int kPart = 16;  // rows of it are computed one after the other
    static constexpr int kTriangle = kChunk < 2 * kPart ? kPart : 2 * kPart;
    static_assert(kChunk == kTriangle || kChunk == 2 * kTriangle, "two triangles are joined");

    // Eight operands: those of x for which is_below(index) is true, zeros elsewhere.
    template <class IsBelow>
    static FA_DEVICE Words4 packed(const float (&x)[8], IsBelow is_below) {
        Words4 words;
#pragma unroll
        for (int j = 0; j < 8; j += 2)
            words.word[j / 2] = Operand::pack(is_below(j) ? x[j] : 0.0f, is_below(j + 1) ? x[j + 1] : 0.0f);
        return words;
    }

    FA_DEVICE uint32_t system(int row, int column) const { return system_ + row * kPitch + column * 4; }
    FA_DEVICE uint32_t inverse(int row, int column) const { return inverse_ + row * kPitch + column * 4; }

    // One warp inverts a triangle.
    FA_DEVICE void invert_triangle(int first) const {
        if constexpr (kTriangle == kPart) {
            if (lane_index() < kPart) invert_part(first);
            return;
        }
        const int second = first + kPart;
        invert_part(lane_index() < kPart ? first : second);
        warp_barrier();
        multiply<kPart, false>(system(second, first), inverse(first, first), system(first, second));
        warp_barrier();
        multiply<kPart, true>(inverse(second, second), system(first, second), inverse(second, first));
    }

    // A lane computes a column: T_ij = -sum of L_ik T_kj over k < i. It computes four rows at a time, whose sums over
    // earlier rows do not depend on each other.
    FA_DEVICE void invert_part(int first) const {
        const int column = lane_index() % kPart;
        float x[kPart];
#pragma unroll
        for (int row = 0; row < kPart; ++row) x[row] = row == column ? 1.0f : 0.0f;
#pragma unroll
        for (int rows = 0; rows < kPart; rows += 4)
#pragma unroll
            for (int k = 0; k <= rows; k += 4) {
                float elements[4][4];
#pragma unroll
                for (int i = 0; i < 4; ++i) load_numbers(system(first + rows + i, first + k), elements[i]);
#pragma unroll
                for (int j = 0; j < 4; ++j)
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        if (k + j < rows + i) x[rows + i] -= elements[i][j] * x[k + j];
            }
#pragma unroll
        for (int row = 0; row < kPart; ++row) store_number(inverse(first + row, first + column), x[row]);
    }

    // Computes the warp's columns of the square below the first triangle and beside the second.
    FA_DEVICE void join_triangles(int column) const {
        multiply<kTriangle, false>(system(kTriangle, 0), inverse(0, column), system(0, kTriangle + column), column);
        warp_barrier();
        multiply<kTriangle, true>(inverse(kTriangle, kTriangle), system(0, kTriangle + column), inverse(kTriangle, column));
    }

    // A warp computes to = a b, with zeros for what is not finite, or -a b, where a has kSize rows and columns, and b and `to`
    // have kPart columns. b is 0 before first_row, a multiple of kPart; for -a b, a is 0 above its diagonal. A lane computes
    // four columns of every eighth row: with smaller shares, values would be loaded more often.
    template <int kSize, bool kNegates>
    FA_DEVICE void multiply(uint32_t a, uint32_t b, uint32_t to, int first_row = 0) const {
        constexpr int kRows = kSize / 8;
        const int row = lane_index() / 4 * kPitch, column = lane_index() % 4 * 16;  // in bytes
        float sums[kRows][4] = {};
#pragma unroll
        for (int part = 0; part < kSize; part += kPart) {
            if (part < first_row) continue;
            const int first = kNegates ? part / 8 : 0;
#pragma unroll 1
            for (int k = part; k < part + kPart; k += 4) {
                float left[kRows][4];
#pragma unroll
                for (int r = first; r < kRows; ++r) load_numbers(a + row + r * 8 * kPitch + k * 4, left[r]);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    float right[4];
                    load_numbers(b + (k + i) * kPitch + column, right);
#pragma unroll
                    for (int r = first; r < kRows; ++r)
#pragma unroll
                        for (int j = 0; j < 4; ++j) sums[r][j] += left[r][i] * right[j];
                }
            }
        }
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            Words4 words;
#pragma unroll
            for (int j = 0; j < 4; ++j)
                words.word[j] = as_bits(kNegates ? -sums[r][j] : is_finite(sums[r][j]) ? sums[r][j] : 0.0f);
            store_shared_128(to + row + r * 8 * kPitch + column, words);
        }
    }

    uint32_t system_, inverse_;
};

// Writes an inverse to scratch.
FA_DEVICE void write_inverse(const Triangle& triangle, const ChunkParams& p, int slot) {
    const int64_t at = static_cast<int64_t>(slot) * (kChunk * kChunk);
    triangle.write(p.inverse + at, p.turned_inverse == nullptr ? nullptr : p.turned_inverse + at);
}

}  // namespace fastattention
