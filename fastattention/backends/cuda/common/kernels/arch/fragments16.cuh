// Matrix products on Turing and newer: instructions over 16 query rows, whose operands ldmatrix loads.
//
// Two neighbouring accumulators, rounded to 16 bits, form an operand A of 16 x 16, so probabilities stay in registers
// between the two products.
#pragma once

#include "layout16.cuh"

namespace fastattention {

// ScoreMma: the instruction of the product with keys. Its operands are as wide: a pair of bytes may replace an element.
template <class Mma, class ScoreMma = Mma>
struct Fragments16 : Layout16 {
    static constexpr int kSharedBytes = Config::element_bytes;  // of an element in shared memory
    static constexpr int kKeyStep = 16;     // keys come in multiples of this

    // Loads operands A from rows in shared memory.
    template <int kPitch>
    class SharedRows {
    public:
        SharedRows() = default;
        // rows: address of the warp's first row.
        FA_DEVICE explicit SharedRows(uint32_t rows) : row_(rows, lane_index() % 16, lane_index() / 16) {}

        // Reads 16 rows and 16 columns.
        FA_DEVICE void read(uint32_t (&a)[4], int step, int depth) const { load_matrices(a, row_.address(step * 16, depth)); }

    private:
        LaneRow<kPitch> row_;
    };

    // Loads operands A whose rows are the columns of a tile in shared memory.
    template <int kPitch>
    class SharedColumns {
    public:
        // tile: address of the first row, at the first column.
        FA_DEVICE explicit SharedColumns(uint32_t tile)
            : row_(tile, lane_index() / 16 * 8 + lane_index() % 8, lane_index() / 8 % 2) {}

        // Reads 16 columns and 16 rows.
        FA_DEVICE void read(uint32_t (&a)[4], int step, int depth) const {
            load_matrices_transposed(a, row_.address(depth * 16, step));
        }

    private:
        LaneRow<kPitch> row_;
    };

    // Operands A of the first product: kSteps x 16 rows of a tile, kColumns wide.
    template <int kSteps, int kColumns>
    class Rows {
    public:
        // tile: address of the warp's first row.
        FA_DEVICE void load(uint32_t tile) {
            rows_ = SharedRows<pitch_of<2>(kColumns)>(tile);
            if constexpr (kQueriesInRegisters) {
#pragma unroll
                for (int step = 0; step < kSteps; ++step)
#pragma unroll
                    for (int depth = 0; depth < kColumns / 16; ++depth) rows_.read(fragments_[step][depth], step, depth);
            }
        }

        // Operand A of 16 columns.
        FA_DEVICE void fragment(uint32_t (&a)[4], int step, int depth) const {
            if constexpr (kQueriesInRegisters) {
#pragma unroll
                for (int i = 0; i < 4; ++i) a[i] = fragments_[step][depth][i];
            } else {
                rows_.read(a, step, depth);
            }
        }

    private:
        SharedRows<pitch_of<2>(kColumns)> rows_;
        uint32_t fragments_[kQueriesInRegisters ? kSteps : 1][kQueriesInRegisters ? kColumns / 16 : 1][4];
    };

    // acc_s += q k^T for the warp's keys. It works for any rows and any tile that are kColumns wide.
    template <int kSteps, int kColumns, int kTiles>
    static FA_DEVICE void multiply_rows(float (&acc_s)[kSteps][kTiles][4], const Rows<kSteps, kColumns>& q, uint32_t k) {
        constexpr int kPitch = pitch_of<2>(kColumns);
        const int lane = opaque(lane_index());
        if constexpr (kTiles == 1) return multiply_eight_keys(acc_s, q, k);
        const LaneRow<kPitch> row(k, first_warp_key() + lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll
        for (int depth = 0; depth < kColumns / 16; ++depth) {
            uint32_t a[kSteps][4];
#pragma unroll
            for (int step = 0; step < kSteps; ++step) q.fragment(a[step], step, depth);
#pragma unroll
            for (int n = 0; n < kTiles / 2; ++n) {
                uint32_t b[4];
                load_matrices(b, row.address(n * 16, depth));
                multiply_add_pairs<ScoreMma>(acc_s, 2 * n, a, b);
            }
        }
    }

    // The same for a warp with eight keys: 32 columns at once, the first and the second 16 in separate accumulators.
    template <int kSteps, int kColumns>
    static FA_DEVICE void multiply_eight_keys(float (&acc_s)[kSteps][1][4], const Rows<kSteps, kColumns>& q, uint32_t k) {
        const int lane = opaque(lane_index());
        const LaneRow<pitch_of<2>(kColumns)> row(k, first_warp_key() + lane % 8, lane / 8 % 2);
        float acc[kSteps][2][4] = {};
#pragma unroll
        for (int depth = 0; depth < kColumns / 16; depth += 2) {
            uint32_t b[4];
            load_matrices(b, row.address(0, depth + lane / 16));
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int part = 0; part < ScoreMma::kParts; ++part)
#pragma unroll
                    for (int step = 0; step < kSteps; ++step) {
                        uint32_t a[4];
                        q.fragment(a, step, depth + half);
                        ScoreMma::multiply_add(acc[step][half], a, b[2 * half], b[2 * half + 1], part);
                    }
        }
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
#pragma unroll
            for (int i = 0; i < 4; ++i) acc_s[step][0][i] += acc[step][0][i] + acc[step][1][i];
    }

    // The same, into accumulators with the column layout of Values.
    template <int kSteps, int kColumns, int kTiles>
    static FA_DEVICE void multiply_rows_as_values(float (&acc)[kSteps][kTiles][4], const Rows<kSteps, kColumns>& q,
                                                  uint32_t k) {
        multiply_rows(acc, q, k);
    }

    // acc[.][n] += a b[0..1], acc[.][n + 1] += a b[2..3]. Instructions of different products alternate, so that none waits
    // for the one before it.
    template <class Product, int kSteps, int kTiles>
    static FA_DEVICE void multiply_add_pairs(float (&acc)[kSteps][kTiles][4], int n, const uint32_t (&a)[kSteps][4],
                                             const uint32_t (&b)[4]) {
#pragma unroll
        for (int part = 0; part < Product::kParts; ++part)
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
                Product::multiply_add(acc[step][n], a[step], b[0], b[1], part);
                Product::multiply_add(acc[step][n + 1], a[step], b[2], b[3], part);
            }
    }

    // Probabilities of 16 keys as operand A of the second product: the warp's own, and those that warps exchange.
    template <int kSteps, int kTiles>
    static FA_DEVICE void operands_of(uint32_t (&a)[kSteps][4], const float (&p)[kSteps][kTiles][4], int group) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float* pair = &p[step][2 * group + i / 2][i % 2 * 2];
                a[step][i] = Operand::pack(pair[0], pair[1]);
            }
    }

    using SharedProbabilities = SharedRows<kProbabilityPitch>;

    // Operands A from SharedRows or SharedColumns.
    template <int kSteps, int kPitch, template <int> class Shared>
    static FA_DEVICE void operands_of(uint32_t (&a)[kSteps][4], const Shared<kPitch>& p, int group) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) p.read(a[step], step, group);
    }

    // Operands A from any rows in shared memory.
    template <int kSteps, int kColumns>
    static FA_DEVICE void operands_of(uint32_t (&a)[kSteps][4], const Rows<kSteps, kColumns>& p, int group) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) p.fragment(a[step], step, group);
    }

    // Stores the warp's own probabilities in the layout of SharedProbabilities(rows).
    template <int kSteps>
    static FA_DEVICE void leave_probabilities(uint32_t rows, const float (&p)[kSteps][kWarpKeys / 8][4]) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
#pragma unroll
            for (int which = 0; which < 2; ++which) {
                const int row = step * 16 + Layout16::row(which), swizzle = swizzle_of(kProbabilityPitch, row);
#pragma unroll
                for (int n = 0; n < kWarpKeys / 8; ++n) {
                    const int chunk = (first_warp_key() / 8 + n) ^ swizzle;
                    const float* pair = &p[step][n][2 * which];
                    store_shared_32(rows + row * kProbabilityPitch + chunk * 16 + lane_index() % 4 * 4,
                                    Operand::pack(pair[0], pair[1]));
                }
            }
    }

    // x = tile^T: reads rows of a tile that is kColumns wide into columns of accumulators.
    template <int kColumns, int kSteps, int kTiles>
    static FA_DEVICE void read_transposed(float (&x)[kSteps][kTiles][4], uint32_t tile) {
        constexpr int kPairs = kTiles > 1 ? 2 : 1;  // matrices per load
        const int lane = opaque(lane_index());
        const LaneRow<pitch_of<2>(kColumns)> row(tile, lane / 16 % kPairs * 8 + lane % 8, lane / 8 % 2);
#pragma unroll
        for (int n = 0; n < kTiles; n += kPairs)
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
                uint32_t words[4];
                load_matrices_transposed(words, row.address(n * 8, step));
#pragma unroll
                for (int pair = 0; pair < kPairs; ++pair)
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        x[step][n + pair][i] = Operand::widen(static_cast<uint16_t>(words[2 * pair + i / 2] >> i % 2 * 16));
            }
    }

    // Stores accumulators of Values::accumulate as rows of operands.
    template <int kPitch, int kSteps, int kTiles>
    static FA_DEVICE void leave_values(const float (&acc)[kSteps][kTiles][4], uint32_t to) {
        Layout16::leave_scores<kPitch>(acc, to);
    }

    // Operand B of the second product, read from a tile of values, or of any rows that are kColumns wide, from first_column on.
    template <int kColumns>
    class Values {
    public:
        FA_DEVICE explicit Values(uint32_t v, int first_column = 0) : first_pair_(first_column / 16) {
            const int lane = opaque(lane_index());
            row_ = LaneRow<kPitch>(v, lane % 16, lane / 16);
        }

        // acc_o += p v for keys 16 group ... 16 group + 15 of the tile.
        template <int kSteps, int kTiles, class Probabilities>
        FA_DEVICE void accumulate(float (&acc_o)[kSteps][kTiles][4], const Probabilities& p, int group) const {
            uint32_t a[kSteps][4];
            operands_of(a, p, group);
#pragma unroll
            for (int n = 0; n < kTiles / 2; ++n) {
                uint32_t b[4];
                load_matrices_transposed(b, row_.address(group * 16, first_pair_ + n));
                multiply_add_pairs<Mma>(acc_o, 2 * n, a, b);
            }
        }

    private:
        static constexpr int kPitch = pitch_of<2>(kColumns);

        LaneRow<kPitch> row_;
        const int first_pair_;
    };
};

}  // namespace fastattention
