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

namespace fastattention {

// A warp multiplies its rows, queries or keys, with all keys.
constexpr int kRowGroups = kChunk / Arch::kStepRows;
static_assert(kWarps == kRowGroups * (kDeltaRule ? 2 : 1), "a warp has rows of queries or of keys");
static_assert(kThreads >= kChunk, "a thread has a token");

// Tokens of a part. Within a part, gates are multiplied and rows of the inverse are computed one after the other. Across
// parts they are products of parts.
constexpr int kPart = 16;

using TokenCopy = TileCopy<Arch, WholeCta, uint16_t, false, kChunk, kHeaddim>;

// Added to the squared length of a key or query.
constexpr float kLengthEpsilon = 1e-6f;  // as in linear/reference.py

// The shared memory of a chunk: keys and queries, products of gates, and values per token. With the delta rule, L later
// takes the place of the products, and its inverse the place of keys and queries.
class ChunkMemory {
    // Eight rows that 16 lanes read together, 8 bytes each, are in different banks.
    static constexpr int kProductPitch = (kChunk + 8) * 4;
    static constexpr int kProducts = 2 * TokenCopy::kBytes, kGates = kProducts + kChunk * kProductPitch,
                         kBetas = kGates + kChunk * 4, kLengths = kBetas + kChunk * 4;

    static_assert(kLengths + 2 * kChunk * 4 == Config::shared_bytes);

public:
    // Row pitch of L and its inverse: eight lanes that read 16 bytes each of neighbouring rows are in different banks.
    static constexpr int kPitch = (kChunk + 4) * 4;
    static_assert(kPitch <= kProductPitch && kChunk * kPitch <= 2 * TokenCopy::kBytes, "there is room");

    FA_DEVICE ChunkMemory() : at_(shared_memory()) {}

    FA_DEVICE uint32_t keys() const { return at_; }
    FA_DEVICE uint32_t queries() const { return at_ + TokenCopy::kBytes; }
    // a(row, column), 0 for column > row; column kChunk stands for -1, kChunk + 1 for the token before the row's part.
    FA_DEVICE uint32_t product(int row, int column) const { return at_ + kProducts + row * kProductPitch + column * 4; }
    FA_DEVICE uint32_t gate(int token) const { return at_ + kGates + token * 4; }
    FA_DEVICE uint32_t beta(int token) const { return at_ + kBetas + token * 4; }
    // The factors of keys, then of queries: inverses of their lengths. Without the delta rule, betas are factors of keys.
    FA_DEVICE uint32_t length(int row) const { return at_ + kLengths + row * 4; }
    // Elements of L, and of its inverse.
    FA_DEVICE uint32_t system(int row, int column) const { return at_ + kProducts + row * kPitch + column * 4; }
    FA_DEVICE uint32_t inverse(int row, int column) const { return at_ + row * kPitch + column * 4; }

private:
    uint32_t at_;
};

FA_DEVICE float load_number(uint32_t at) { return as_float(load_shared_32(at)); }
FA_DEVICE void store_number(uint32_t at, float x) { store_shared_32(at, as_bits(x)); }

FA_DEVICE void load_numbers(uint32_t at, float* four) {
    const Words4 words = load_shared_128(at);
#pragma unroll
    for (int i = 0; i < 4; ++i) four[i] = as_float(words.word[i]);
}

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
            if (warp_index() < kChunk / kTriangle) invert_triangle(warp_index() * kTriangle);
            cta_barrier();
            if constexpr (kChunk > kTriangle) {
                if (warp_index() < kTriangle / kPart) join_triangles(warp_index() * kPart);
                cta_barrier();
            }
            write_inverse();
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

    // Stores L in shared memory. Its diagonal is never read.
    FA_DEVICE void leave_system(const Products& products, int group) const {
        visit_pairs(products, group, [&](int row, int column, const float* pair) {
            const int odd = row % 2;  // neighbouring rows begin with different columns, in different banks
            store_number(memory_.system(row, column + odd), odd ? pair[1] : pair[0]);
            store_number(memory_.system(row, column + 1 - odd), odd ? pair[0] : pair[1]);
        });
    }

    // The inverse T of a triangle (L1, 0; L21, L2) is (T1, 0; -T2 L21 T1, T2). So parts on the diagonal are inverted first.
    // Products join two of them to a triangle, and two triangles to the whole. L21 T1 is kept in unused memory of L above
    // the diagonal meanwhile.
    static constexpr int kTriangle = kChunk < 2 * kPart ? kPart : 2 * kPart;
    static_assert(kChunk == kTriangle || kChunk == 2 * kTriangle, "two triangles are joined");

    // One warp inverts a triangle.
    FA_DEVICE void invert_triangle(int first) const {
        if constexpr (kTriangle == kPart) {
            if (lane_index() < kPart) invert_part(first);
            return;
        }
        const int second = first + kPart;
        invert_part(lane_index() < kPart ? first : second);
        warp_barrier();
        multiply<kPart, false>(memory_.system(second, first), memory_.inverse(first, first), memory_.system(first, second));
        warp_barrier();
        multiply<kPart, true>(memory_.inverse(second, second), memory_.system(first, second), memory_.inverse(second, first));
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
                float system[4][4];
#pragma unroll
                for (int i = 0; i < 4; ++i) load_numbers(memory_.system(first + rows + i, first + k), system[i]);
#pragma unroll
                for (int j = 0; j < 4; ++j)
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        if (k + j < rows + i) x[rows + i] -= system[i][j] * x[k + j];
            }
#pragma unroll
        for (int row = 0; row < kPart; ++row) store_number(memory_.inverse(first + row, first + column), x[row]);
    }

    // Computes the warp's columns of the square below the first triangle and beside the second.
    FA_DEVICE void join_triangles(int column) const {
        multiply<kTriangle, false>(memory_.system(kTriangle, 0), memory_.inverse(0, column),
                                   memory_.system(0, kTriangle + column), column);
        warp_barrier();
        multiply<kTriangle, true>(memory_.inverse(kTriangle, kTriangle), memory_.system(0, kTriangle + column),
                                  memory_.inverse(kTriangle, column));
    }

    // A warp computes to = a b, or -a b, where a has kSize rows and columns, and b and `to` have kPart columns. b is 0
    // before first_row, a multiple of kPart; for -a b, a is 0 above its diagonal. A lane computes four columns of every
    // eighth row: with smaller shares, values would be loaded more often.
    template <int kSize, bool kNegates>
    FA_DEVICE void multiply(uint32_t a, uint32_t b, uint32_t to, int first_row = 0) const {
        constexpr int kPitch = ChunkMemory::kPitch, kRows = kSize / 8;
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
            for (int j = 0; j < 4; ++j) words.word[j] = as_bits(kNegates ? -sums[r][j] : sums[r][j]);
            store_shared_128(to + row + r * 8 * kPitch + column, words);
        }
    }

    FA_DEVICE void write_inverse() const {
        for (int i = thread_index(); i < kChunk * (kChunk / 8); i += kThreads) {
            const int row = i / (kChunk / 8), column = i % (kChunk / 8) * 8;
            Words4 words = {};
            if (column < row) {
                float x[8];
#pragma unroll
                for (int four = 0; four < 8; four += 4) load_numbers(memory_.inverse(row, column + four), &x[four]);
#pragma unroll
                for (int j = 0; j < 8; j += 2)
                    words.word[j / 2] = Operand::pack(column + j < row ? x[j] : 0.0f, column + j + 1 < row ? x[j + 1] : 0.0f);
            }
            store_global_128(p_.inverse + (static_cast<int64_t>(slot_) * kChunk + row) * kChunk + column, words);
        }
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
