// Pascal: no matrix instructions. Tiles are float in shared memory, products are ordinary multiply-adds in float.
//
// Rows and columns are divided among lanes as on Turing (layout16.cuh). For the second product the lane that has a key's
// probability hands it to the three others of the row.
#pragma once

#include "layout16.cuh"

namespace fastattention {

struct Arch : Layout16 {
    static constexpr bool kAsyncCopy = false;
    static constexpr bool kSeparateFullTiles = false;
    static constexpr int kSharedBytes = 4;
    static constexpr int kKeyStep = 8;  // keys come in multiples of this

    template <class Item>
    static FA_DEVICE void store_chunk(uint32_t to, Words4 chunk) {
        if constexpr (sizeof(Item) == 1) {
            store_widened<Float16>(to, widen_half(chunk, 0));
            store_widened<Float16>(to + 32, widen_half(chunk, 1));
        } else {
            store_widened<Element>(to, chunk);
        }
    }

    // Eight numbers of 16 bits as floats.
    template <class Number>
    static FA_DEVICE void store_widened(uint32_t to, Words4 chunk) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            Words4 wide;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const uint32_t word = chunk.word[half * 2 + i / 2];
                wide.word[i] = as_bits(Number::widen(static_cast<uint16_t>(word >> (i % 2 * 16))));
            }
            store_shared_128(to + half * 16, wide);
        }
    }

    template <int kSteps>
    struct Queries {
        static_assert(!kQueriesInRegisters, "as floats queries would fill the registers");
        uint32_t address;

        FA_DEVICE void load(uint32_t q) { address = q; }
    };

    template <int kSteps>
    static FA_DEVICE void multiply_queries(float (&acc_s)[kSteps][kTileN / 8][4], const Queries<kSteps>& q, uint32_t k) {
        constexpr int kPitch = pitch_of<4>(kHeaddim);
        const int lane = lane_index();
        const uint32_t q_at = q.address + lane / 4 * kPitch;
        const uint32_t k_at = k + lane % 4 * 2 * kPitch;
#pragma unroll 2
        for (int depth = 0; depth < kHeaddim; depth += 4) {
            Words4 rows[kSteps][2];
#pragma unroll
            for (int step = 0; step < kSteps; ++step)
#pragma unroll
                for (int which = 0; which < 2; ++which)
                    rows[step][which] = load_shared_128(q_at + (step * 16 + which * 8) * kPitch + depth * 4);
#pragma unroll
            for (int n = 0; n < kTileN / 8; ++n)
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    const Words4 key = load_shared_128(k_at + (n * 8 + c) * kPitch + depth * 4);
#pragma unroll
                    for (int step = 0; step < kSteps; ++step)
#pragma unroll
                        for (int which = 0; which < 2; ++which)
#pragma unroll
                            for (int i = 0; i < 4; ++i)
                                acc_s[step][n][which * 2 + c] += as_float(rows[step][which].word[i]) * as_float(key.word[i]);
                }
        }
    }

    // Operands of the second product, read from a tile of values.
    class Values {
    public:
        FA_DEVICE explicit Values(uint32_t v) : at_(v + lane_index() % 4 * 8) {}

        // acc_o += p v for keys 8 group ... 8 group + 7 of the tile.
        template <int kSteps>
        FA_DEVICE void accumulate(float (&acc_o)[kSteps][kHeaddimV / 8][4], const float (&p)[kSteps][kTileN / 8][4],
                                  int group) const {
            constexpr int kPitch = pitch_of<4>(kHeaddimV);
            const int lane = lane_index();
#pragma unroll
            for (int key = 0; key < 8; ++key) {
                float weight[kSteps][2];
#pragma unroll
                for (int step = 0; step < kSteps; ++step)
#pragma unroll
                    for (int which = 0; which < 2; ++which)
                        weight[step][which] = shuffle(p[step][group][which * 2 + key % 2], lane / 4 * 4 + key / 2);
#pragma unroll
                for (int column = 0; column < kHeaddimV / 8; ++column) {
                    const Words2 value = load_shared_64(at_ + (group * 8 + key) * kPitch + column * 32);
#pragma unroll
                    for (int step = 0; step < kSteps; ++step)
#pragma unroll
                        for (int i = 0; i < 4; ++i)
                            acc_o[step][column][i] += weight[step][i / 2] * as_float(value.word[i % 2]);
                }
            }
        }

    private:
        uint32_t at_;
    };
};

}  // namespace fastattention
