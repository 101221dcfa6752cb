// Products of the gates between two tokens of a chunk, with one gate per head. a(i, j) is the product of the gates of tokens
// j+1 to i, and a(i, -1) of all tokens of the chunk up to i.
#pragma once

#include "chunk.cuh"
#include "numbers_in_shared.cuh"
#include "variant.cuh"

namespace fastattention {

// Gates and their products in shared memory. All threads of a CTA use it together.
class GateProducts {
    // Tokens of a part. Within a part, gates are multiplied one after the other. Across parts they are products of parts.
    static constexpr int kPart = 16;
    static constexpr int kShares = kThreads / kChunk;  // threads that share the rows of a column
    static_assert(kThreads % kChunk == 0 && kPart % kShares == 0, "a thread has rows of a part");

public:
    // Eight rows that 16 lanes read together, 8 bytes each, are in different banks.
    static constexpr int kPitch = (kChunk + 8) * 4;
    static constexpr int kBytes = kChunk * kPitch + kChunk * 4;

    // at: address of kBytes
    explicit FA_DEVICE GateProducts(uint32_t at) : at_(at) {}

    // a(row, column), 0 for column > row; column kChunk stands for -1, kChunk + 1 for the token before the row's part.
    FA_DEVICE uint32_t product(int row, int column) const { return at_ + row * kPitch + column * 4; }
    FA_DEVICE uint32_t gate(int token) const { return at_ + kChunk * kPitch + token * 4; }

    // Multiplies gates within parts, one more gate from row to row. Quotients of products since the start of the chunk would
    // be inexact once these underflow. Columns after those of tokens are for the tokens before parts. Gates were stored
    // before a barrier.
    FA_DEVICE void multiply_within_parts() const {
        for (int column = thread_index(); column < kChunk + kChunk / kPart; column += kThreads) {
            const bool is_token = column < kChunk;
            const int part = is_token ? column / kPart * kPart : (column - kChunk) * kPart;
            const int first = is_token ? column - part : -1, to = is_token ? column : kChunk + 1;
            float gates[kPart];
#pragma unroll
            for (int four = 0; four < kPart; four += 4) load_numbers(gate(part + four), &gates[four]);
            float x = 1.0f;
#pragma unroll
            for (int row = 0; row < kPart; ++row) {
                if (row > first) x *= gates[row];
                store_number(product(part + row, to), row >= first ? x : 0.0f);
            }
        }
    }

    // After a barrier, multiplies gates from a token to tokens of later parts: the rest of its own part, the parts in
    // between, and the beginning of the later part. Threads share the rows of a column.
    FA_DEVICE void multiply_parts() const {
        constexpr int kRows = kPart / kShares;
        const int column = thread_index() % kChunk, share = thread_index() / kChunk * kRows;
        const int own_part = column / kPart * kPart;
        for (int part = 0; part < own_part; part += kPart)
#pragma unroll
            for (int i = 0; i < kRows; ++i) store_number(product(part + share + i, column), 0.0f);
        float x = load_number(product(own_part + kPart - 1, column));
        for (int part = own_part + kPart; part < kChunk; part += kPart) {
            float within[kRows];
#pragma unroll
            for (int i = 0; i < kRows; ++i) within[i] = load_number(product(part + share + i, kChunk + 1));
            const float whole = load_number(product(part + kPart - 1, kChunk + 1));
#pragma unroll
            for (int i = 0; i < kRows; ++i) store_number(product(part + share + i, column), x * within[i]);
            x *= whole;
        }
        if (thread_index() >= kChunk) return;
        const int row = thread_index();
        x = load_number(product(row, kChunk + 1));
        for (int last = kPart - 1; last < row; last += kPart) x *= load_number(product(last, kChunk + 1));
        store_number(product(row, kChunk), x);
    }

private:
    uint32_t at_;
};

}  // namespace fastattention
