// Of every chunk of tokens what depends on no state, with one gate a head; all chunks at once. With a(i, j) the product of the
// gates of tokens j+1 to i, and -1 for all tokens of the chunk up to i:
//
//     scores   scale a(i, j) (q_i . k_j)  for j <= i
//     inverse  (I + L)^-1 - I of the delta rule, where L is beta_i a(i, j) (k_i . k_j) for j < i
//     factors  of tokens, FactorPlane below, and a(last, -1)
//
// Lengths of queries and keys, where they are to be 1, are such factors too: rows stay as they are.
#pragma once

#include FA_ARCH_HEADER

#include "chunk.cuh"
#include "factors.cuh"
#include "lanes.cuh"

namespace fastattention {

// A warp multiplies its rows, of queries or of keys, with all keys.
constexpr int kRowGroups = kChunk / Arch::kStepRows;
static_assert(kWarps == kRowGroups * (kDeltaRule ? 2 : 1), "a warp has rows of queries or of keys");

using TokenCopy = TileCopy<Arch, WholeCta, uint16_t, false, kChunk, kHeaddim>;

// The inverse of a key's or query's length.
constexpr float kLengthEpsilon = 1e-6f;  // reference.py says the same

// What a chunk has in shared memory: keys, queries; products of gates, which make room for L and its inverse; numbers of tokens.
class ChunkMemory {
    // Eight rows that lanes read together, 16 of them 8 bytes each, are in different banks.
    static constexpr int kProductPitch = (kChunk + 8) * 4;
    static constexpr int kProducts = 2 * TokenCopy::kBytes, kGates = kProducts + kChunk * kProductPitch,
                         kBetas = kGates + kChunk * 4, kLengths = kBetas + kChunk * 4;

public:
    static constexpr int kBytes = kLengths + 2 * kChunk * 4;

    FA_DEVICE ChunkMemory() : at_(shared_memory()) {}

    FA_DEVICE uint32_t keys() const { return at_; }
    FA_DEVICE uint32_t queries() const { return at_ + TokenCopy::kBytes; }
    // a(row, column), for column <= row; column kChunk stands for -1.
    FA_DEVICE uint32_t product(int row, int column) const { return at_ + kProducts + row * kProductPitch + column * 4; }
    FA_DEVICE uint32_t gate(int token) const { return at_ + kGates + token * 4; }
    FA_DEVICE uint32_t beta(int token) const { return at_ + kBetas + token * 4; }
    // Of keys, then of queries.
    FA_DEVICE uint32_t length(int row) const { return at_ + kLengths + row * 4; }

private:
    uint32_t at_;
};
static_assert(ChunkMemory::kBytes == FA_SHARED_BYTES, "chunk_config.py computes the same");

FA_DEVICE float load_number(uint32_t at) { return as_float(load_shared_32(at)); }
FA_DEVICE void store_number(uint32_t at, float x) { store_shared_32(at, as_bits(x)); }

class PrepareChunk {
public:
    FA_DEVICE PrepareChunk(const ChunkParams& p, const Sequence& sequence, int chunk, int head)
        : p_(p), sequence_(sequence), head_(head), first_(chunk * kChunk), slot_(slot_of(p, sequence, head) + chunk) {}

    FA_DEVICE void run() const {
        const int key_head = head_ / p_.group_size;
        copy_tokens(p_.k + sequence_.offset(p_.k_stride_batch, p_.k_stride_row, p_.k_stride_head, key_head), p_.k_stride_row,
                    memory_.keys());
        copy_tokens(p_.q + sequence_.offset(p_.q_stride_batch, p_.q_stride_row, p_.q_stride_head, key_head), p_.q_stride_row,
                    memory_.queries());
        if constexpr (Arch::kAsyncCopy) copy_async_commit();
        read_gates();
        cta_barrier();
        multiply_gates();
        if constexpr (Arch::kAsyncCopy) copy_async_wait<0>();
        cta_barrier();
        if (p_.normalises) {
            find_lengths();
            cta_barrier();
        }
        write_factors();
        const int group = warp_index() % kRowGroups;
        if (warp_index() < kRowGroups) {
            write_scores(group);
        } else {
            leave_system(group);
        }
        if constexpr (kDeltaRule) {
            cta_barrier();
            invert();
            cta_barrier();
            if constexpr (kChunk > kTriangle) join_triangles();
            write_inverse();
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

    // Tokens that there are not leave the state as it is.
    FA_DEVICE void read_gates() const {
        for (int token = thread_index(); token < kChunk; token += kThreads) {
            const bool exists = first_ + token < sequence_.length;
            float gate = 1.0f, beta = 0.0f;
            if (exists) {
                const int64_t at = sequence_.offset(p_.g_stride_batch, p_.g_stride_row, p_.g_stride_head, head_);
                gate = exp2_approximate(number_at(p_.g, at + (first_ + token) * p_.g_stride_row, p_.gate_format) * kLog2E);
            }
            if (kDeltaRule && exists) {
                const int64_t at = sequence_.offset(p_.beta_stride_batch, p_.beta_stride_row, p_.beta_stride_head, head_);
                beta = number_at(p_.beta, at + (first_ + token) * p_.beta_stride_row, p_.beta_format);
            }
            store_number(memory_.gate(token), gate);
            store_number(memory_.beta(token), beta);
        }
    }

    // One gate more from row to row: a quotient of products that begin with the chunk would lose what they no longer hold.
    FA_DEVICE void multiply_gates() const {
        for (int column = thread_index(); column <= kChunk; column += kThreads) {
            const int first = column == kChunk ? -1 : column;
            float product = 1.0f;
#pragma unroll 8
            for (int row = 0; row < kChunk; ++row) {
                if (row > first) product *= load_number(memory_.gate(row));
                if (row >= first) store_number(memory_.product(row, column), product);
            }
        }
    }

    // As many lanes as a row has chunks of eight share it. Of a row of zeros, which stays one, any factor will do: 0 keeps
    // what it is multiplied with from overflowing.
    FA_DEVICE void find_lengths() const {
        constexpr int kLanes = kHeaddim / 8, kRows = 32 / kLanes;
        for (int row = warp_index() * kRows + lane_index() / kLanes; row < 2 * kChunk; row += kWarps * kRows) {
            const Words4 words = load_shared_128(memory_.keys() + row * TokenCopy::kPitch + lane_index() % kLanes * 16);
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const float x = Element::widen(static_cast<uint16_t>(words.word[i / 2] >> i % 2 * 16));
                sum += x * x;
            }
            sum = sum_of_lanes<kLanes>(sum);
            const float inverse = sum == 0.0f ? 0.0f : exp2_approximate(-0.5f * log2_approximate(sum + kLengthEpsilon));
            if (lane_index() % kLanes == 0) store_number(memory_.length(row), inverse);
        }
    }

    FA_DEVICE float key_factor(int token) const { return p_.normalises ? load_number(memory_.length(token)) : 1.0f; }
    FA_DEVICE float query_factor(int token) const {
        return p_.scale * (p_.normalises ? load_number(memory_.length(kChunk + token)) : 1.0f);
    }

    FA_DEVICE void write_factors() const {
        float* to = p_.factors + slot_ * kFactors;
        for (int token = thread_index(); token < kChunk; token += kThreads) {
            const float before = load_number(memory_.product(token, kChunk)), key = key_factor(token);
            to[kKeysOfState * kChunk + token] = before * key;
            to[kQueriesOfState * kChunk + token] = before * query_factor(token);
            to[kKeysToState * kChunk + token] = load_number(memory_.product(kChunk - 1, token)) * key;
            to[kBetas * kChunk + token] = load_number(memory_.beta(token));
            if (token == kChunk - 1) to[kStateFactor] = before;
        }
    }

    // Calls visit(row, column, two products of it and the next column) of the warp's rows of a tile with all keys.
    template <class Visit>
    FA_DEVICE void multiply_keys(uint32_t tile, int group, Visit visit) const {
        typename Arch::template Rows<1, kHeaddim> rows;
        rows.load(tile + group * Arch::kStepRows * TokenCopy::kPitch);
        Products products = {};
        Arch::multiply_rows(products, rows, memory_.keys());
        warp_barrier();  // its rows are read
#pragma unroll
        for (int n = 0; n < kChunk / 8; ++n)
#pragma unroll
            for (int i = 0; i < Arch::kElements; i += 2)
                visit(group * Arch::kStepRows + Arch::row(Arch::row_of_element(i)), Arch::score_column(n, i),
                      &products[0][n][i]);
    }

    // Through the place of the warp's own queries.
    FA_DEVICE void write_scores(int group) const {
        multiply_keys(memory_.queries(), group, [&](int row, int column, const float* pair) {
            const float query = query_factor(row);
            float scores[2];
#pragma unroll
            for (int i = 0; i < 2; ++i)
                scores[i] = column + i > row
                                ? 0.0f
                                : pair[i] * (load_number(memory_.product(row, column + i)) * query * key_factor(column + i));
            store_shared_32(memory_.queries() + row * TokenCopy::kPitch + column * 2, Operand::pack(scores[0], scores[1]));
        });
        warp_barrier();
        const int first_row = group * Arch::kStepRows;
        for (int i = lane_index(); i < Arch::kStepRows * (kChunk / 8); i += 32) {
            const int row = first_row + i / (kChunk / 8), column = i % (kChunk / 8) * 8;
            store_global_128(p_.scores + (slot_ * kChunk + row) * kChunk + column,
                             load_shared_128(memory_.queries() + row * TokenCopy::kPitch + column * 2));
        }
    }

    // L, transposed, above the diagonal of the products.
    FA_DEVICE void leave_system(int group) const {
        multiply_keys(memory_.keys(), group, [&](int row, int column, const float* pair) {
            const float key = load_number(memory_.beta(row)) * key_factor(row);
#pragma unroll
            for (int i = 0; i < 2; ++i)
                if (column + i < row)
                    store_number(memory_.product(column + i, row),
                                 pair[i] * (load_number(memory_.product(row, column + i)) * key * key_factor(column + i)));
        });
    }

    // Rows of T that are found one after the other.
    static constexpr int kTriangle = kChunk < 32 ? kChunk : 32;
    static_assert(kChunk == kTriangle || kChunk == 2 * kTriangle, "two triangles are joined");

    // A thread finds a column of the inverse T, within the triangle of kTriangle rows at the diagonal that it is in, row by
    // row: T_ij = -sum of L_ik T_kj over k < i. It lies below the diagonal of the products. 16 rows at a time, so that one
    // number of T serves as many products.
    FA_DEVICE void invert() const {
        const int column = thread_index();
        if (column >= kChunk) return;
        const int first = column / kTriangle * kTriangle;  // the same for all lanes
#pragma unroll 1
        for (int block = first; block < first + kTriangle; block += 16) {
            float x[16];
#pragma unroll
            for (int row = 0; row < 16; ++row) x[row] = block + row == column ? 1.0f : 0.0f;
#pragma unroll 1
            for (int k = first; k < block; ++k) subtract_row(x, k, block, inverse(k, column));
#pragma unroll
            for (int row = 0; row < 16; ++row) {
                if (row < 15) subtract_row(x, block + row, block, x[row], row + 1);
                if (block + row > column) store_number(memory_.product(block + row, column), x[row]);
            }
        }
    }

    // Of T, within a triangle.
    FA_DEVICE float inverse(int row, int column) const {
        return row < column ? 0.0f : row == column ? 1.0f : load_number(memory_.product(row, column));
    }

    // The square below the first triangle and beside the second: -T2 L T1, where L is what the system has there. A lane has
    // a column, a warp some rows.
    FA_DEVICE void join_triangles() const {
        constexpr int kRows = kTriangle / kWarps;
        const int column = lane_index(), first_row = kTriangle + warp_index() * kRows;
        float square[kRows] = {};
#pragma unroll 4
        for (int k = 0; k < kTriangle; ++k) {
            const float t = inverse(k, column);
#pragma unroll
            for (int row = 0; row < kRows; ++row) square[row] += load_number(memory_.product(k, first_row + row)) * t;
        }
        leave_square(square, first_row, column);
#pragma unroll
        for (int row = 0; row < kRows; ++row) square[row] = 0.0f;
#pragma unroll 4
        for (int k = kTriangle; k < kChunk; ++k) {
            const float x = load_number(memory_.product(k, column));
#pragma unroll
            for (int row = 0; row < kRows; ++row) square[row] -= inverse(first_row + row, k) * x;
        }
        cta_barrier();
        leave_square(square, first_row, column);
    }

    template <int kRows>
    FA_DEVICE void leave_square(const float (&square)[kRows], int first_row, int column) const {
#pragma unroll
        for (int row = 0; row < kRows; ++row) store_number(memory_.product(first_row + row, column), square[row]);
        cta_barrier();
    }

    // x_i -= L_ik t for the rows i of a block, from one of them on. Before that one others may write meanwhile.
    FA_DEVICE void subtract_row(float (&x)[16], int k, int block, float t, int from = 0) const {
#pragma unroll
        for (int four = 0; four < 16; four += 4) {
            if (four >= from) {
                const Words4 system = load_shared_128(memory_.product(k, block + four));
#pragma unroll
                for (int i = 0; i < 4; ++i) x[four + i] -= as_float(system.word[i]) * t;
            } else {
#pragma unroll
                for (int i = four; i < four + 4; ++i)
                    if (i >= from) x[i] -= load_number(memory_.product(k, block + i)) * t;
            }
        }
    }

    FA_DEVICE void write_inverse() const {
        for (int i = thread_index(); i < kChunk * (kChunk / 8); i += kThreads) {
            const int row = i / (kChunk / 8), column = i % (kChunk / 8) * 8;
            Words4 words;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const Words4 four = load_shared_128(memory_.product(row, column + 4 * half));
                const auto number = [&](int at) { return column + 4 * half + at < row ? as_float(four.word[at]) : 0.0f; };
                words.word[2 * half] = Operand::pack(number(0), number(1));
                words.word[2 * half + 1] = Operand::pack(number(2), number(3));
            }
            store_global_128(p_.inverse + (slot_ * kChunk + row) * kChunk + column, words);
        }
    }

    const ChunkParams& p_;
    const Sequence sequence_;
    const int head_, first_;  // first token, of the sequence
    const int64_t slot_;
    const ChunkMemory memory_;
};

}  // namespace fastattention

extern "C" FA_KERNEL void FA_LAUNCH_BOUNDS(fastattention::kThreads, FA_MIN_CTAS)
    fastattention_linear_prepare(FA_PARAMETER fastattention::ChunkParams params) {
    using namespace fastattention;
    let_next_kernel_start();
    const int slot = static_cast<int>(cta_index() / params.nheads), head = static_cast<int>(cta_index() % params.nheads);
    const Sequence sequence = sequence_of_slot(params, slot);
    const int chunk = slot - sequence.first_slot;
    if (chunk >= sequence.num_chunks()) return;
    PrepareChunk(params, sequence, chunk, head).run();
}
