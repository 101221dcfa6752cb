// Computes what does not depend on the state, for all chunks of tokens at once, with one gate per head. a(i, j) is the
// product of the gates of tokens j+1 to i, and a(i, -1) of all tokens of the chunk up to i:
//
//     scores   scale a(i, j) (q_i . k_j)  for j <= i; without the delta rule times beta_j, with `skip` added where i = j
//     inverse  (I + L)^-1 - I of the delta rule, where L is beta_i a(i, j) (k_i . k_j) for j < i
//     factors  per token (FactorPlane), and a(last, -1)
//
// If queries and keys are normalized, the inverses of their lengths are part of these factors; rows do not change.
#pragma once

#include FA_ARCH_HEADER

#include "chunk.cuh"
#include "factors.cuh"
#include "gates.cuh"
#include "lanes.cuh"
#include "triangle.cuh"

namespace fastattention {

// A warp multiplies its rows, queries or keys, with all keys.
constexpr int kRowGroups = kChunk / Arch::kStepRows;
static_assert(kWarps == kRowGroups * (kDeltaRule ? 2 : 1), "a warp has rows of queries or of keys");
static_assert(kThreads >= kChunk, "a thread has a token");

// Tokens of a part. Within a part, gates are multiplied one after the other. Across parts they are products of parts.
constexpr int kPart = 16;

using TokenCopy = TileCopy<Arch, WholeCta, uint16_t, false, kChunk, kHeaddim>;

// The shared memory of a chunk: keys and queries, products of gates, and values per token. With the delta rule, L later
// takes the place of the products, and its inverse the place of keys and queries.
class ChunkMemory {
    // Eight rows that 16 lanes read together, 8 bytes each, are in different banks.
    static constexpr int kProductPitch = (kChunk + 8) * 4;
    static constexpr int kProducts = 2 * TokenCopy::kBytes, kGates = kProducts + kChunk * kProductPitch,
                         kBetas = kGates + kChunk * 4, kLengths = kBetas + kChunk * 4;

    static_assert(kLengths + 2 * kChunk * 4 == Config::shared_bytes);

public:
    static_assert(Triangle::kPitch <= kProductPitch && Triangle::kBytes <= 2 * TokenCopy::kBytes, "there is room");

    FA_DEVICE ChunkMemory() : at_(shared_memory()) {}

    FA_DEVICE uint32_t keys() const { return at_; }
    FA_DEVICE uint32_t queries() const { return at_ + TokenCopy::kBytes; }
    // a(row, column), 0 for column > row; column kChunk stands for -1, kChunk + 1 for the token before the row's part.
    FA_DEVICE uint32_t product(int row, int column) const { return at_ + kProducts + row * kProductPitch + column * 4; }
    FA_DEVICE uint32_t gate(int token) const { return at_ + kGates + token * 4; }
    FA_DEVICE uint32_t beta(int token) const { return at_ + kBetas + token * 4; }
    // The factors of keys, then of queries: inverses of their lengths. Without the delta rule, betas are factors of keys.
    FA_DEVICE uint32_t length(int row) const { return at_ + kLengths + row * 4; }
    FA_DEVICE Triangle triangle() const { return {at_ + kProducts, at_}; }

private:
    uint32_t at_;
};

class PrepareChunk {
public:
    FA_DEVICE PrepareChunk(const ChunkParams& p, const Sequence& sequence, int chunk, int head)
        : p_(p),
          sequence_(sequence),
          head_(head),
          first_(chunk * kChunk),
          slot_(static_cast<int>(slot_of(p, sequence, head)) + chunk) {}

    FA_DEVICE void run() const {
        const TokenBits bits = read_gates();  // they arrive while tokens are copied
        const int key_head = head_ / p_.group_size;
        copy_tokens(p_.k + sequence_.offset(p_.k_stride_batch, p_.k_stride_row, p_.k_stride_head, key_head), p_.k_stride_row,
                    memory_.keys());
        copy_tokens(p_.q + sequence_.offset(p_.q_stride_batch, p_.q_stride_row, p_.q_stride_head, key_head), p_.q_stride_row,
                    memory_.queries());
        if constexpr (Arch::kAsyncCopy) copy_async_commit();
        leave_gates(bits);
        cta_barrier();
        multiply_within_parts();
        if constexpr (Arch::kAsyncCopy) copy_async_wait<0>();
        cta_barrier();
        multiply_parts();
        if (kDeltaRule && p_.normalizes) find_lengths();
        cta_barrier();
        const bool has_queries = warp_index() < kRowGroups;
        const int group = warp_index() % kRowGroups;
        Products products = {};
        multiply_keys(products, has_queries, group);
        write_factors();
        if constexpr (kDeltaRule) cta_barrier();  // all threads have read keys and products of gates
        if (has_queries) {
            write_scores(products, group);
        } else {
            leave_system(products, group);
        }
        if constexpr (kDeltaRule) {
            cta_barrier();
            memory_.triangle().invert();
            memory_.triangle().write(p_.inverse + static_cast<int64_t>(slot_) * (kChunk * kChunk));
        }
    }

private:
    using Products = float[1][kChunk / 8][Arch::kElements];

    // The gate and beta of a thread's token, as they are in memory.
    struct TokenBits {
        uint32_t gate, beta;
    };

    FA_DEVICE void copy_tokens(const uint16_t* base, int stride_row, uint32_t to) const {
        TokenCopy tokens({base, stride_row, sequence_.length, p_.columns_k});
        if constexpr (Arch::kAsyncCopy) {
            tokens.begin(first_, to);
        } else {
            tokens.copy(first_, to);
        }
    }

    FA_DEVICE bool has_token() const { return thread_index() < kChunk && first_ + thread_index() < sequence_.length; }

    FA_DEVICE TokenBits read_gates() const {
        TokenBits bits = {};
        if (!has_token()) return bits;
        const int64_t token = first_ + thread_index();
        const int64_t gates = sequence_.offset(p_.g_stride_batch, p_.g_stride_row, p_.g_stride_head, head_);
        bits.gate = read_bits(p_.g, gates + token * p_.g_stride_row, p_.gate_format);
        if (p_.beta != nullptr) {
            const int64_t betas = sequence_.offset(p_.beta_stride_batch, p_.beta_stride_row, p_.beta_stride_head, head_);
            bits.beta = read_bits(p_.beta, betas + token * p_.beta_stride_row, p_.beta_format);
        }
        return bits;
    }

    // Stores gates and betas in shared memory. Padding tokens leave the state unchanged.
    FA_DEVICE void leave_gates(TokenBits bits) const {
        const int token = thread_index();
        if (token >= kChunk) return;
        const float gate = has_token() ? exp2_approximate(widen_bits(bits.gate, p_.gate_format) * kLog2E) : 1.0f;
        store_number(memory_.gate(token), gate);
        const float beta = p_.beta == nullptr ? 1.0f : has_token() ? widen_bits(bits.beta, p_.beta_format) : 0.0f;
        store_number(memory_.beta(token), beta);
        store_number(memory_.length(token), kDeltaRule ? 1.0f : beta);
        store_number(memory_.length(kChunk + token), 1.0f);
    }

    // Multiplies gates within parts, one more gate from row to row. Quotients of products since the start of the chunk would
    // be inexact once these underflow. Columns after those of tokens are for the tokens before parts.
    FA_DEVICE void multiply_within_parts() const {
        for (int column = thread_index(); column < kChunk + kChunk / kPart; column += kThreads) {
            const bool is_token = column < kChunk;
            const int part = is_token ? column / kPart * kPart : (column - kChunk) * kPart;
            const int first = is_token ? column - part : -1, to = is_token ? column : kChunk + 1;
            float gates[kPart];
#pragma unroll
            for (int four = 0; four < kPart; four += 4) load_numbers(memory_.gate(part + four), &gates[four]);
            float product = 1.0f;
#pragma unroll
            for (int row = 0; row < kPart; ++row) {
                if (row > first) product *= gates[row];
                store_number(memory_.product(part + row, to), row >= first ? product : 0.0f);
            }
        }
    }

    // Multiplies gates from a token to tokens of later parts: the rest of its own part, the parts in between, and the
    // beginning of the later part. Threads share the rows of a column.
    FA_DEVICE void multiply_parts() const {
        constexpr int kRows = kPart * kChunk / kThreads;
        const int column = thread_index() % kChunk, share = thread_index() / kChunk * kRows;
        const int own_part = column / kPart * kPart;
        for (int part = 0; part < own_part; part += kPart)
#pragma unroll
            for (int i = 0; i < kRows; ++i) store_number(memory_.product(part + share + i, column), 0.0f);
        float product = load_number(memory_.product(own_part + kPart - 1, column));
        for (int part = own_part + kPart; part < kChunk; part += kPart) {
            float within[kRows];
#pragma unroll
            for (int i = 0; i < kRows; ++i) within[i] = load_number(memory_.product(part + share + i, kChunk + 1));
            const float whole = load_number(memory_.product(part + kPart - 1, kChunk + 1));
#pragma unroll
            for (int i = 0; i < kRows; ++i) store_number(memory_.product(part + share + i, column), product * within[i]);
            product *= whole;
        }
        if (thread_index() >= kChunk) return;
        const int row = thread_index();
        product = load_number(memory_.product(row, kChunk + 1));
        for (int last = kPart - 1; last < row; last += kPart) product *= load_number(memory_.product(last, kChunk + 1));
        store_number(memory_.product(row, kChunk), product);
    }

    // Computes the inverses of lengths; eight lanes share a row. For a row of zeros any factor will do, and 0 keeps products
    // with the factor from overflowing.
    FA_DEVICE void find_lengths() const {
        constexpr int kSteps = 2 * kChunk / (4 * kWarps);  // a warp has four rows per step
        float sums[kSteps] = {};
        const int first = warp_index() * 4 + lane_index() / 8;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            const uint32_t row = memory_.keys() + (first + step * 4 * kWarps) * TokenCopy::kPitch + lane_index() % 8 * 16;
#pragma unroll
            for (int column = 0; column < kHeaddim; column += 64) {
                const Words4 words = load_shared_128(row + column * 2);
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    const float x = Element::widen(static_cast<uint16_t>(words.word[i / 2] >> i % 2 * 16));
                    sums[step] += x * x;
                }
            }
        }
#pragma unroll
        for (int step = 0; step < kSteps; ++step) sums[step] = sum_of_lanes<8>(sums[step]);
        if (lane_index() % 8 != 0) return;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            const float sum = sums[step];
            store_number(memory_.length(first + step * 4 * kWarps),
                         sum == 0.0f ? 0.0f : exp2_approximate(-0.5f * log2_approximate(sum + kLengthEpsilon)));
        }
    }

    FA_DEVICE float key_factor(int token) const { return load_number(memory_.length(token)); }
    FA_DEVICE float query_factor(int token) const { return p_.scale * load_number(memory_.length(kChunk + token)); }

    FA_DEVICE void write_factors() const {
        float* to = p_.factors + static_cast<int64_t>(slot_) * kFactors;
        for (int token = thread_index(); token < kChunk; token += kThreads) {
            const float before = load_number(memory_.product(token, kChunk)), key = key_factor(token);
            to[kKeysOfState * kChunk + token] = before * key;
            to[kQueriesOfState * kChunk + token] = before * query_factor(token);
            to[kKeysToState * kChunk + token] = load_number(memory_.product(kChunk - 1, token)) * key;
            to[kBetas * kChunk + token] = load_number(memory_.beta(token));
            if (token == kChunk - 1) to[kStateFactor] = before;
        }
    }

    // Computes scores of the warp's queries, or L of its keys, with zeros above the diagonal.
    FA_DEVICE void multiply_keys(Products& products, bool has_queries, int group) const {
        typename Arch::template Rows<1, kHeaddim> rows;
        rows.load((has_queries ? memory_.queries() : memory_.keys()) + group * Arch::kStepRows * TokenCopy::kPitch);
        Arch::multiply_rows(products, rows, memory_.keys());
        warp_barrier();  // all lanes have read the rows
        const float skip = p_.skip != nullptr ? p_.skip[head_] : 0.0f;
        int row[2];
        float factor[2];
#pragma unroll
        for (int which = 0; which < 2; ++which) {
            row[which] = group * Arch::kStepRows + Arch::row(which);
            factor[which] =
                has_queries ? query_factor(row[which]) : load_number(memory_.beta(row[which])) * key_factor(row[which]);
        }
#pragma unroll
        for (int n = 0; n < kChunk / 8; ++n)
#pragma unroll
            for (int i = 0; i < Arch::kElements; i += 4) {  // two elements of each row
                const int column = Arch::score_column(n, i);
                const Words2 keys = load_shared_64(memory_.length(column));
#pragma unroll
                for (int which = 0; which < 2; ++which) {
                    const Words2 gates = load_shared_64(memory_.product(row[which], column));
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        float& product = products[0][n][i + 2 * which + j];
                        const float x = as_float(gates.word[j]) * factor[which] * as_float(keys.word[j]);
                        product = column + j > row[which] ? 0.0f : product * x;
                        if (!kDeltaRule && column + j == row[which]) product += skip;
                    }
                }
            }
    }

    // Calls visit(row, column, pair) with the products in `column` and the next column.
    template <class Visit>
    FA_DEVICE void visit_pairs(const Products& products, int group, Visit visit) const {
#pragma unroll
        for (int n = 0; n < kChunk / 8; ++n)
#pragma unroll
            for (int i = 0; i < Arch::kElements; i += 2)
                visit(group * Arch::kStepRows + Arch::row(Arch::row_of_element(i)), Arch::score_column(n, i),
                      &products[0][n][i]);
    }

    // Writes scores by way of the memory of the warp's own queries.
    FA_DEVICE void write_scores(const Products& products, int group) const {
        visit_pairs(products, group, [&](int row, int column, const float* pair) {
            store_shared_32(memory_.queries() + row * TokenCopy::kPitch + column * 2, Operand::pack(pair[0], pair[1]));
        });
        warp_barrier();
        const int first_row = group * Arch::kStepRows;
#pragma unroll
        for (int i = lane_index(); i < Arch::kStepRows * (kChunk / 8); i += 32) {
            const int row = first_row + i / (kChunk / 8), column = i % (kChunk / 8) * 8;
            store_global_128(p_.scores + (static_cast<int64_t>(slot_) * kChunk + row) * kChunk + column,
                             load_shared_128(memory_.queries() + row * TokenCopy::kPitch + column * 2));
        }
    }

    FA_DEVICE void leave_system(const Products& products, int group) const {
        visit_pairs(products, group, [&](int row, int column, const float* pair) {
            memory_.triangle().store_pair(row, column, pair[0], pair[1]);
        });
    }

    const ChunkParams& p_;
    const Sequence sequence_;
    const int head_, first_;  // the chunk's first token in the sequence
    const int slot_;  // index among the slots of all heads
    const ChunkMemory memory_;
};

}  // namespace fastattention

extern "C" FA_KERNEL void FA_LAUNCH_BOUNDS(fastattention::kThreads, fastattention::Config::min_ctas)
    fastattention_linear_prepare(FA_PARAMETER fastattention::ChunkParams params) {
    using namespace fastattention;
    const int slot = static_cast<int>(cta_index() / params.nheads), head = static_cast<int>(cta_index() % params.nheads);
    const Sequence sequence = sequence_of_slot(params, slot);
    const int chunk = slot - sequence.first_slot;
    if (chunk >= sequence.num_chunks()) return;
    PrepareChunk(params, sequence, chunk, head).run();
}
