// Volta: m8n8k4, four independent 8 x 8 x 4 products of the four quadpairs of a warp (docs/internals/volta.md).
//
// The quadpairs take different query rows, 32 together, and the same keys. Quadpair p is lanes 4p ... 4p + 3 and 4p + 16 ...
// 4p + 19. With h = lane / 16, v = lane / 2 % 2, u = lane % 2, a lane of it holds
//   operand A       row lane % 4 + 4 h, four columns
//   accumulator     element i: row u + (i & 2) + 4 h, column (i & 4) + 2 v + (i & 1)
// so a lane has rows r and r + 2 of the scores, and the lane at distance 2 has the other columns of both. They exchange one
// of the two rows, and each lane then has all eight probabilities of one row. Half of them are operand A of one instruction,
// half of the next: two shuffles instead of a round trip through shared memory. The keys come out in the order 0 1 4 5,
// 2 3 6 7, and the rows of V are read in that order too.
//
// The first four query rows of a quadpair are neighbours, and so are the other four, eight rows further on. So lanes 8i ...
// 8i + 7, which shared memory serves together, read eight neighbouring rows.
#pragma once

#include "../probability_exchange.cuh"
#include "transposed.cuh"

namespace fastattention {

struct Arch {
    static_assert(kColumnWarps == 1 && !kValuesInKeys, "probabilities stay in registers");
    static constexpr bool kAsyncCopy = false;
    static constexpr bool kSeparateFullTiles = true;
    static constexpr int kSharedBytes = Config::element_bytes;
    static constexpr int kKeyStep = 8;  // keys come in multiples of this
    static constexpr int kStepRows = Config::step_rows;
    static constexpr int kElements = kStepRows / 4;

    static constexpr int kRowGap = 2;  // between the two rows of a lane
    static FA_DEVICE constexpr int row_of_element(int i) { return i / 2 % 2; }
    static FA_DEVICE int row(int which) {
        const int lane = lane_index();
        return lane / 8 % 2 * 16 + lane / 16 * 8 + lane / 4 % 2 * 4 + which * kRowGap + lane % 2;
    }
    static FA_DEVICE int score_column(int tile, int i) { return tile * 8 + i / 4 * 4 + lane_index() / 2 % 2 * 2 + i % 2; }
    // Two neighbouring accumulators alternate between quarters of 16 columns, so that a lane's operands of both are 16
    // neighbouring bytes of a row of V.
    static FA_DEVICE int value_column(int tile, int i) {
        return tile / 2 * 16 + i / 4 * 8 + tile % 2 * 4 + lane_index() / 2 % 2 * 2 + i % 2;
    }

    static constexpr bool kSplitsColumns = false;

    static FA_DEVICE constexpr int column_of_element(int i) { return i / 4 * 2 + i % 2; }

    template <class Combine>
    static FA_DEVICE float reduce_row(float x, Combine combine) {
        return combine(x, shuffle_xor(x, 2));
    }

    // Lanes at this distance have neighbouring rows of a step, an even one first.
    static constexpr int kNextRowLane = 1;

    // Combines the values of all lanes that have the same columns.
    template <class Combine>
    static FA_DEVICE float reduce_column(float x, Combine combine) {
        x = combine(x, shuffle_xor(x, 1));
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2) x = combine(x, shuffle_xor(x, distance));
        return x;
    }

    template <class Item>
    static FA_DEVICE void store_chunk(uint32_t to, Words4 chunk) {
        store_operands<Item>(to, chunk);
    }

    // The row of a step that a lane has operands A of.
    static FA_DEVICE int own_row() {
        const int lane = lane_index();
        return lane / 8 % 2 * 16 + lane / 16 * 8 + lane % 8;
    }

    // The row of an 8 x 8 operand that a lane reads.
    static FA_DEVICE int operand_row() { return lane_index() % 4 + lane_index() / 16 * 4; }

    template <int kSteps, int kColumns>
    class Rows {
    public:
        // tile: address of the warp's first row.
        FA_DEVICE void load(uint32_t tile) {
            at_ = tile + own_row() * kPitch;
            if constexpr (kQueriesInRegisters) {
#pragma unroll
                for (int step = 0; step < kSteps; ++step)
#pragma unroll
                    for (int depth = 0; depth < kColumns / 8; ++depth) fragments_[step][depth] = read(step, depth);
            }
        }

        // Operands A of two products, eight columns in all.
        FA_DEVICE Words4 fragment(int step, int depth) const {
            if constexpr (kQueriesInRegisters) return fragments_[step][depth];
            return read(step, depth);
        }

    private:
        static constexpr int kPitch = pitch_of<2>(kColumns);

        FA_DEVICE Words4 read(int step, int depth) const {
            return load_shared_128(at_ + step * kStepRows * kPitch + depth * 16);
        }

        uint32_t at_;
        Words4 fragments_[kQueriesInRegisters ? kSteps : 1][kQueriesInRegisters ? kColumns / 8 : 1];
    };

    template <int kSteps, int kColumns, int kTiles>
    static FA_DEVICE void multiply_rows(float (&acc_s)[kSteps][kTiles][8], const Rows<kSteps, kColumns>& q, uint32_t k) {
        multiply_rows_at(acc_s, q, k, operand_row(), [](int n) { return n * 8; });
    }

    // The same, into accumulators with the column layout of Values, whose columns are other rows of k.
    template <int kSteps, int kColumns, int kTiles>
    static FA_DEVICE void multiply_rows_as_values(float (&acc)[kSteps][kTiles][8], const Rows<kSteps, kColumns>& q,
                                                  uint32_t k) {
        multiply_rows_at(acc, q, k, lane_index() % 4 + lane_index() / 16 * 8, [](int n) { return n / 2 * 16 + n % 2 * 4; });
    }

    // row: the lane's row of k; row_of_tile(n): the rows to add to it for accumulator n.
    template <int kSteps, int kColumns, int kTiles, class RowOfTile>
    static FA_DEVICE void multiply_rows_at(float (&acc)[kSteps][kTiles][8], const Rows<kSteps, kColumns>& q, uint32_t k,
                                           int row, RowOfTile row_of_tile) {
        constexpr int kPitch = pitch_of<2>(kColumns);
        const uint32_t at = k + row * kPitch;
#pragma unroll
        for (int depth = 0; depth < kColumns / 8; ++depth) {
            Words4 a[kSteps];
#pragma unroll
            for (int step = 0; step < kSteps; ++step) a[step] = q.fragment(step, depth);
#pragma unroll
            for (int n = 0; n < kTiles; ++n) {
                const Words4 b = load_shared_128(at + row_of_tile(n) * kPitch + depth * 16);
#pragma unroll
                for (int step = 0; step < kSteps; ++step) {
                    mma_m8n8k4_row_col(acc[step][n], a[step].word[0], a[step].word[1], b.word[0], b.word[1]);
                    mma_m8n8k4_row_col(acc[step][n], a[step].word[2], a[step].word[3], b.word[2], b.word[3]);
                }
            }
        }
    }

    // Two lanes at distance 2 exchange rows. Each holds two columns of two rows, and gets all four columns of one row: the
    // first lane of the first row, the second of the second.
    static FA_DEVICE Words2 exchange_rows(const float* p) {
        const bool second = lane_index() & 2;
        const uint32_t row0 = Operand::pack(p[0], p[1]), row1 = Operand::pack(p[2], p[3]);
        const uint32_t received = shuffle_xor(second ? row0 : row1, 2);
        return {second ? received : row0, second ? row1 : received};
    }

    // Stores accumulators of multiply_rows as rows of operands, kPitch bytes each.
    template <int kPitch, int kSteps, int kTiles>
    static FA_DEVICE void leave_scores(const float (&acc)[kSteps][kTiles][8], uint32_t to) {
        const uint32_t at = to + own_row() * kPitch;
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
#pragma unroll
            for (int n = 0; n < kTiles; ++n)
                leave_eight(at + step * kStepRows * kPitch + n * 16, &acc[step][n][0], &acc[step][n][4]);
    }

    // Stores accumulators of Values::accumulate as rows of operands, kPitch bytes each.
    template <int kPitch, int kSteps, int kTiles>
    static FA_DEVICE void leave_values(const float (&acc)[kSteps][kTiles][8], uint32_t to) {
        const uint32_t at = to + own_row() * kPitch;
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
#pragma unroll
            for (int n = 0; n < kTiles; ++n)
                leave_eight(at + step * kStepRows * kPitch + n * 16, &acc[step][n / 2 * 2][n % 2 * 4],
                            &acc[step][n / 2 * 2 + 1][n % 2 * 4]);
    }

    // Stores eight columns of a lane's row, given the first and the last four columns of two rows.
    static FA_DEVICE void leave_eight(uint32_t to, const float* first, const float* last) {
        const Words2 low = exchange_rows(first), high = exchange_rows(last);
        store_shared_128(to, {low.word[0], low.word[1], high.word[0], high.word[1]});
    }

    // x = tile^T: reads rows of a tile that is kColumns wide into columns of accumulators.
    template <int kColumns, int kSteps, int kTiles>
    static FA_DEVICE void read_transposed(float (&x)[kSteps][kTiles][8], uint32_t tile) {
        read_numbers_transposed<Arch, pitch_of<2>(kColumns)>(x, tile);
    }

    // Operand B of the second product, read from a tile of values.
    template <int kColumns>
    class Values {
    public:
        // Points to keys 0 1 4 5 of eight; the second half of the products reads the keys two further on.
        FA_DEVICE explicit Values(uint32_t v) {
            const int lane = lane_index();
            at_ = v + (lane % 2 + lane / 2 % 2 * 4) * kPitch + lane / 16 * 16;
        }

        // acc_o += p v for keys 8 group ... 8 group + 7 of the tile.
        template <int kSteps, int kTiles, int kTilesOfP>
        FA_DEVICE void accumulate(float (&acc_o)[kSteps][kTiles][8], const float (&p)[kSteps][kTilesOfP][8],
                                  int group) const {
            Words2 a[kSteps][2];  // for keys 0 to 3, and 4 to 7
#pragma unroll
            for (int step = 0; step < kSteps; ++step)
#pragma unroll
                for (int i = 0; i < 2; ++i) a[step][i] = exchange_rows(&p[step][group][4 * i]);
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int column = 0; column < kTiles / 2; ++column) {
                    const Words4 b = load_shared_128(at_ + (group * 8 + half * 2) * kPitch + column * 32);
#pragma unroll
                    for (int step = 0; step < kSteps; ++step) {
                        const uint32_t a0 = a[step][0].word[half], a1 = a[step][1].word[half];
                        mma_m8n8k4_row_row(acc_o[step][2 * column], a0, a1, b.word[0], b.word[1]);
                        mma_m8n8k4_row_row(acc_o[step][2 * column + 1], a0, a1, b.word[2], b.word[3]);
                    }
                }
        }

        // The same with p from rows in shared memory, whose keys are in order. The tile's keys are then read in order too.
        template <int kSteps, int kTiles, int kColumnsOfP>
        FA_DEVICE void accumulate(float (&acc_o)[kSteps][kTiles][8], const Rows<kSteps, kColumnsOfP>& p, int group) const {
            const uint32_t at = at_ - lane_index() / 2 % 2 * 2 * kPitch;
            Words4 a[kSteps];
#pragma unroll
            for (int step = 0; step < kSteps; ++step) a[step] = p.fragment(step, group);
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int column = 0; column < kTiles / 2; ++column) {
                    const Words4 b = load_shared_128(at + (group * 8 + half * 4) * kPitch + column * 32);
#pragma unroll
                    for (int step = 0; step < kSteps; ++step) {
                        const uint32_t a0 = a[step].word[2 * half], a1 = a[step].word[2 * half + 1];
                        mma_m8n8k4_row_row(acc_o[step][2 * column], a0, a1, b.word[0], b.word[1]);
                        mma_m8n8k4_row_row(acc_o[step][2 * column + 1], a0, a1, b.word[2], b.word[3]);
                    }
                }
        }

    private:
        static constexpr int kPitch = pitch_of<2>(kColumns);

        uint32_t at_;
    };
};

}  // namespace fastattention
