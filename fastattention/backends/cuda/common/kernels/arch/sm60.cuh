// Pascal has no matrix instructions. Products are ordinary multiply-adds in float, and tiles in shared memory are float, or
// float16 where floats would not fit.
//
// Rows and columns are divided among lanes as on Turing (layout16.cuh). For the second product the lane with a key's
// probability shuffles it to the three other lanes of the row.
#pragma once

#include "layout16.cuh"
#include "transposed.cuh"

namespace fastattention {

struct Arch : Layout16 {
    static_assert(kColumnWarps == 1 && !kValuesInKeys, "probabilities stay in registers");
    static constexpr bool kAsyncCopy = false;
    static constexpr bool kSeparateFullTiles = false;
    static constexpr int kSharedBytes = Config::element_bytes;
    static constexpr int kKeyStep = 8;  // keys come in multiples of this

    template <class Item>
    static FA_DEVICE void store_chunk(uint32_t to, Words4 chunk) {
        if constexpr (kSharedBytes == 2) {
            store_operands<Item>(to, chunk);
        } else if constexpr (sizeof(Item) == 1) {
            store_widened<Float16>(to, widen_half(chunk, 0));
            store_widened<Float16>(to + 32, widen_half(chunk, 1));
        } else {
            store_widened<Element>(to, chunk);
        }
    }

    // Stores eight 16-bit elements as floats.
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

    // Neighbouring elements, read from shared memory.
    template <int kCount>
    struct Numbers {
        float x[kCount];

        Numbers() = default;
        FA_DEVICE explicit Numbers(uint32_t at) {
            uint32_t words[kCount * kSharedBytes / 4];
            load(words, at);
#pragma unroll
            for (int i = 0; i < kCount; ++i)
                x[i] = kSharedBytes == 4 ? as_float(words[i])
                                         : Float16::widen(static_cast<uint16_t>(words[i / 2] >> i % 2 * 16));
        }

    private:
        static FA_DEVICE void load(uint32_t (&words)[1], uint32_t at) { words[0] = load_shared_32(at); }
        static FA_DEVICE void load(uint32_t (&words)[2], uint32_t at) { copy(words, load_shared_64(at)); }
        static FA_DEVICE void load(uint32_t (&words)[4], uint32_t at) { copy(words, load_shared_128(at)); }

        template <class Words, int kWords>
        static FA_DEVICE void copy(uint32_t (&words)[kWords], const Words& from) {
#pragma unroll
            for (int i = 0; i < kWords; ++i) words[i] = from.word[i];
        }
    };

    template <int kSteps, int kColumns>
    struct Rows {
        static_assert(!kQueriesInRegisters, "as floats queries would fill the registers");
        uint32_t address;

        FA_DEVICE void load(uint32_t tile) { address = tile; }
    };

    template <int kSteps, int kColumns, int kTiles>
    static FA_DEVICE void multiply_rows(float (&acc_s)[kSteps][kTiles][4], const Rows<kSteps, kColumns>& q, uint32_t k) {
        constexpr int kPitch = pitch_of<kSharedBytes>(kColumns);
        const int lane = lane_index();
        const uint32_t q_at = q.address + lane / 4 * kPitch;
        const uint32_t k_at = k + lane % 4 * 2 * kPitch;
#pragma unroll 2
        for (int depth = 0; depth < kColumns; depth += 4) {
            Numbers<4> rows[kSteps][2];
#pragma unroll
            for (int step = 0; step < kSteps; ++step)
#pragma unroll
                for (int which = 0; which < 2; ++which)
                    rows[step][which] = Numbers<4>(q_at + (step * 16 + which * 8) * kPitch + depth * kSharedBytes);
#pragma unroll
            for (int n = 0; n < kTiles; ++n)
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    const Numbers<4> key(k_at + (n * 8 + c) * kPitch + depth * kSharedBytes);
#pragma unroll
                    for (int step = 0; step < kSteps; ++step)
#pragma unroll
                        for (int which = 0; which < 2; ++which)
#pragma unroll
                            for (int i = 0; i < 4; ++i) acc_s[step][n][which * 2 + c] += rows[step][which].x[i] * key.x[i];
                }
        }
    }

    // The same, into accumulators with the column layout of Values.
    template <int kSteps, int kColumns, int kTiles>
    static FA_DEVICE void multiply_rows_as_values(float (&acc)[kSteps][kTiles][4], const Rows<kSteps, kColumns>& q,
                                                  uint32_t k) {
        multiply_rows(acc, q, k);
    }

    // x = tile^T: reads rows of a 16-bit tile that is kColumns wide into columns of accumulators.
    template <int kColumns, int kSteps, int kTiles>
    static FA_DEVICE void read_transposed(float (&x)[kSteps][kTiles][4], uint32_t tile) {
        static_assert(kSharedBytes == 2 * (kSteps > 0), "others are not read so");  // depends on kSteps: fails only if used
        read_numbers_transposed<Arch, pitch_of<2>(kColumns)>(x, tile);
    }

    // Stores accumulators of Values::accumulate as rows of operands.
    template <int kPitch, int kSteps, int kTiles>
    static FA_DEVICE void leave_values(const float (&acc)[kSteps][kTiles][4], uint32_t to) {
        leave_scores<kPitch>(acc, to);
    }

    // Operands of the second product, read from a tile of values.
    template <int kColumns>
    class Values {
    public:
        FA_DEVICE explicit Values(uint32_t v) : at_(v + lane_index() % 4 * 2 * kSharedBytes) {}

        // acc_o += p v for keys 8 group ... 8 group + 7 of the tile.
        template <int kSteps, int kTiles, int kTilesOfP>
        FA_DEVICE void accumulate(float (&acc_o)[kSteps][kTiles][4], const float (&p)[kSteps][kTilesOfP][4],
                                  int group) const {
            constexpr int kPitch = pitch_of<kSharedBytes>(kColumns);
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
                for (int column = 0; column < kTiles; ++column) {
                    const Numbers<2> value(at_ + (group * 8 + key) * kPitch + column * 8 * kSharedBytes);
#pragma unroll
                    for (int step = 0; step < kSteps; ++step)
#pragma unroll
                        for (int i = 0; i < 4; ++i) acc_o[step][column][i] += weight[step][i / 2] * value.x[i % 2];
                }
            }
        }

        // The same with p from rows in shared memory.
        template <int kSteps, int kTiles, int kColumnsOfP>
        FA_DEVICE void accumulate(float (&acc_o)[kSteps][kTiles][4], const Rows<kSteps, kColumnsOfP>& p, int group) const {
            constexpr int kPitch = pitch_of<kSharedBytes>(kColumns), kPitchOfP = pitch_of<kSharedBytes>(kColumnsOfP);
            const uint32_t p_at = p.address + lane_index() / 4 * kPitchOfP + group * 8 * kSharedBytes;
#pragma unroll
            for (int four = 0; four < 8; four += 4) {
                Numbers<4> weights[kSteps][2];
#pragma unroll
                for (int step = 0; step < kSteps; ++step)
#pragma unroll
                    for (int which = 0; which < 2; ++which)
                        weights[step][which] = Numbers<4>(p_at + (step * 16 + which * 8) * kPitchOfP + four * kSharedBytes);
#pragma unroll
                for (int key = 0; key < 4; ++key)
#pragma unroll
                    for (int column = 0; column < kTiles; ++column) {
                        const Numbers<2> value(at_ + (group * 8 + four + key) * kPitch + column * 8 * kSharedBytes);
#pragma unroll
                        for (int step = 0; step < kSteps; ++step)
#pragma unroll
                            for (int i = 0; i < 4; ++i)
                                acc_o[step][column][i] += weights[step][i / 2].x[key] * value.x[i % 2];
                    }
            }
        }

    private:
        uint32_t at_;
    };
};

}  // namespace fastattention
