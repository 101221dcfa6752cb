// Tiles of a quantized cache stay bytes in shared memory, one per element, and are widened when they are loaded.
//
// ldmatrix moves pairs of bytes instead of 16-bit elements. A lane gets four neighbouring columns of keys, while a product
// of 16 columns wants two, and two that are eight columns further on; queries are read in the same order. A lane gets two
// neighbouring columns of the values of two keys. One column is an operand of one product, the other of its neighbour, so
// even and odd columns have separate accumulators.
#pragma once

#include "fragments16.cuh"

namespace fastattention {

template <class Mma>
struct Fragments8 : Fragments16<Mma> {
    using Base = Fragments16<Mma>;

    static constexpr bool kSplitsColumns = true;
    static FA_DEVICE int value_column(int tile, int i) {
        return tile / 2 * 16 + (lane_index() % 4 * 2 + i % 2) * 2 + tile % 2;
    }

    template <int kSteps, int kColumns>
    class Rows {
    public:
        // tile: address of the warp's first row.
        FA_DEVICE void load(uint32_t tile) {
            const int lane = lane_index();
            row_ = LaneRow<kPitch>(tile, lane / 4, lane % 4 / 2);
            if constexpr (kQueriesInRegisters) {
#pragma unroll
                for (int step = 0; step < kSteps; ++step)
#pragma unroll
                    for (int depth = 0; depth < kColumns / 16; ++depth) read(fragments_[step][depth], step, depth);
            }
        }

        // Operand A of 16 columns.
        FA_DEVICE void fragment(uint32_t (&a)[4], int step, int depth) const {
            if constexpr (kQueriesInRegisters) {
#pragma unroll
                for (int i = 0; i < 4; ++i) a[i] = fragments_[step][depth][i];
            } else {
                read(a, step, depth);
            }
        }

    private:
        static constexpr int kPitch = pitch_of<2>(kColumns);

        FA_DEVICE void read(uint32_t (&a)[4], int step, int depth) const {
            const int within = lane_index() % 2 * 8;
#pragma unroll
            for (int which = 0; which < 2; ++which) {
                const Words2 four = load_shared_64(row_.address(step * 16 + which * 8, depth) + within);
                a[which] = four.word[0];
                a[2 + which] = four.word[1];
            }
        }

        LaneRow<kPitch> row_;
        uint32_t fragments_[kQueriesInRegisters ? kSteps : 1][kQueriesInRegisters ? kColumns / 16 : 1][4];
    };

    // acc_s += q k^T
    template <int kSteps, int kColumns, int kTiles>
    static FA_DEVICE void multiply_rows(float (&acc_s)[kSteps][kTiles][4], const Rows<kSteps, kColumns>& q, uint32_t k) {
        static_assert(kTiles % 2 == 0 || !kQuantized, "a load has 16 keys");
        const int lane = opaque(lane_index());
        const LaneRow<pitch_of<1>(kColumns)> row(k, first_warp_key() + lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll
        for (int pair = 0; pair < kColumns / 32; ++pair) {
            uint32_t a[2][kSteps][4];
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int step = 0; step < kSteps; ++step) q.fragment(a[half][step], step, 2 * pair + half);
#pragma unroll
            for (int n = 0; n < kTiles / 2; ++n) {
                uint32_t x[4];  // eight keys x 16 columns each: keys 0 to 7 and their next columns, then keys 8 to 15 alike
                load_matrices(x, row.address(n * 16, pair));
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const uint32_t b[4] = {widen_bytes<0, 1>(x[half]), widen_bytes<2, 3>(x[half]),
                                           widen_bytes<0, 1>(x[2 + half]), widen_bytes<2, 3>(x[2 + half])};
                    Base::template multiply_add_pairs<Mma>(acc_s, 2 * n, a[half], b);
                }
            }
        }
    }

    template <int kColumns>
    class Values {
    public:
        FA_DEVICE explicit Values(uint32_t v, int first_column = 0) : first_pair_(first_column / 32) {
            const int lane = opaque(lane_index());
            row_ = LaneRow<kPitch>(v, lane % 16, lane / 16);
        }

        // acc_o += p v for keys 16 group ... 16 group + 15 of the tile.
        template <int kSteps, int kTiles, class Probabilities>
        FA_DEVICE void accumulate(float (&acc_o)[kSteps][kTiles][4], const Probabilities& p, int group) const {
            uint32_t a[kSteps][4];
            Base::operands_of(a, p, group);
#pragma unroll
            for (int pair = 0; pair < kTiles / 4; ++pair) {
                uint32_t x[4];  // eight keys x 16 columns each: keys 0 to 7, keys 8 to 15, and the next columns of both
                load_matrices_transposed(x, row_.address(group * 16, first_pair_ + pair));
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const uint32_t low = x[2 * half], high = x[2 * half + 1];
                    const uint32_t b[4] = {widen_bytes<0, 2>(low), widen_bytes<0, 2>(high), widen_bytes<1, 3>(low),
                                           widen_bytes<1, 3>(high)};
                    Base::template multiply_add_pairs<Mma>(acc_o, 2 * (2 * pair + half), a, b);
                }
            }
        }

    private:
        static constexpr int kPitch = pitch_of<1>(kColumns);

        LaneRow<kPitch> row_;
        const int first_pair_;
    };
};

}  // namespace fastattention
