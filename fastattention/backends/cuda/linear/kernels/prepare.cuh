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
#include "gate_products.cuh"
#include "token_scalars.cuh"
#include "triangle.cuh"

namespace fastattention {

// A warp multiplies its rows, queries or keys, with all keys.
constexpr int kRowGroups = kChunk / Arch::kStepRows;
static_assert(kWarps == kRowGroups * (kDeltaRule ? 2 : 1), "a warp has rows of queries or of keys");
static_assert(kThreads >= kChunk, "a thread has a token");

using TokenCopy = TileCopy<Arch, WholeCta, uint16_t, false, kChunk, kHeaddim>;

// The shared memory of a chunk: keys and queries, products of gates, and values per token. With the delta rule, L later
// takes the place of the products, and its inverse the place of keys and queries.
class ChunkMemory {
    static constexpr int kProducts = 2 * TokenCopy::kBytes, kBetas = kProducts + GateProducts::kBytes,
                         kLengths = kBetas + kChunk * 4;

    static_assert(kLengths + 2 * kChunk * 4 == Config::shared_bytes);

public:
    static_assert(Triangle::kPitch <= GateProducts::kPitch && Triangle::kBytes <= 2 * TokenCopy::kBytes, "there is room");

    FA_DEVICE ChunkMemory() : at_(shared_memory()) {}

    FA_DEVICE uint32_t keys() const { return at_; }
    FA_DEVICE uint32_t queries() const { return at_ + TokenCopy::kBytes; }
    FA_DEVICE GateProducts gates() const { return GateProducts(at_ + kProducts); }
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
        const TokenScalars scalars(p_, sequence_, first_ / kChunk, head_);  // they arrive while tokens are copied
        const int key_head = head_ / p_.group_size;
        copy_tokens(p_.k + sequence_.offset(p_.k_stride_batch, p_.k_stride_row, p_.k_stride_head, key_head), p_.k_stride_row,
                    memory_.keys());
        copy_tokens(p_.q + sequence_.offset(p_.q_stride_batch, p_.q_stride_row, p_.q_stride_head, key_head), p_.q_stride_row,
                    memory_.queries());
        if constexpr (Arch::kAsyncCopy) copy_async_commit();
        leave_gates(scalars);
        cta_barrier();
        memory_.gates().multiply_within_parts();
        if constexpr (Arch::kAsyncCopy) copy_async_wait<0>();
        cta_barrier();
        memory_.gates().multiply_parts();
        if (kDeltaRule && p_.normalizes) find_lengths<2 * kChunk>(memory_.keys(), memory_.length(0));
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
            write_inverse(memory_.triangle(), p_, slot_);
        }
    }

private:
    using Products = float[1][kChunk / 8][Arch::kElements];

    FA_DEVICE void copy_tokens(const uint16_t* base, int stride_row, uint32_t to) const {
        TokenCopy tokens({base, stride_row, sequence_.length, p_.columns_k});
        if constexpr (Arch::kAsyncCopy) {
            tokens.begin(first_, to);
        } else {
            tokens.copy(first_, to);
        }
    }

    // Stores gates and betas in shared memory.
    FA_DEVICE void leave_gates(const TokenScalars& scalars) const {
        const int token = thread_index();
        if (token >= kChunk) return;
        store_number(memory_.gates().gate(token), scalars.gate());
        const float beta = scalars.beta();
        store_number(memory_.beta(token), beta);
        store_number(memory_.length(token), kDeltaRule ? 1.0f : beta);
        store_number(memory_.length(kChunk + token), 1.0f);
    }

    FA_DEVICE float key_factor(int token) const { return load_number(memory_.length(token)); }
    FA_DEVICE float query_factor(int token) const { return p_.scale * load_number(memory_.length(kChunk + token)); }

    FA_DEVICE void write_factors() const {
        float* to = p_.factors + static_cast<int64_t>(slot_) * kFactors;
        for (int token = thread_index(); token < kChunk; token += kThreads) {
            const float before = load_number(memory_.gates().product(token, kChunk)), key = key_factor(token);
            to[kKeysOfState * kChunk + token] = before * key;
            to[kQueriesOfState * kChunk + token] = before * query_factor(token);
            to[kKeysToState * kChunk + token] = load_number(memory_.gates().product(kChunk - 1, token)) * key;
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
                    const Words2 gates = load_shared_64(memory_.gates().product(row[which], column));
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
