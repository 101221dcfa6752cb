// Computes what does not depend on the state, for all chunks of tokens at once, with a gate for every key dimension. a(i, j)
// is the product of the gates of tokens j+1 to i, a vector, and a(i, -1) of all tokens of the chunk up to i:
//
//     q_scaled   scale a(i, -1) q_i          factors   a(last, -1); with the delta rule then beta of each token
//     k_scaled   a(last, j) k_j              scores    scale (a(i, j) q_i) . k_j  for j <= i
//
// and with the delta rule, whose keys ask the state as queries do, asking keys:
//
//     k_scaled   then a(i, -1) k_i           inverse   (I + L)^-1 - I, where L is beta_i (a(i, j) k_i) . k_j for j < i
//
// Scores and L within a subchunk of 4 tokens are summed in float. Those of tokens further apart come from matrix
// instructions, in parts of tokens of several sizes (part_tiles.cuh).
//
// Queries are multiplied by all gates since their part began, keys by all gates after them until their part ends. These are
// products of gates, never quotients, so no factor exceeds 1 and strong gates do not overflow. Operands are rounded to 16
// bits once.
//
// The delta rule normalizes queries and keys if asked to. A first pass over them computes their lengths.
#pragma once

#include FA_ARCH_HEADER

#include "fours.cuh"
#include "part_tiles.cuh"
#include "token_scalars.cuh"
#include "triangle.cuh"

namespace fastattention {

constexpr int kGateFormat = Config::gate_format;
static_assert(kWarps == kChunk / (2 * kSubchunk), "a warp has two subchunks");
static_assert(kHeaddim % kSlice == 0, "slices are whole");

// Shared memory holds tiles of all sizes and each warp's products of gates, and with the delta rule betas and the inverses
// of lengths of queries and keys. Scores, L and its inverse later take the place of tiles.
constexpr int kGatesAt = kSizes * kTileBytes, kBetasAt = kGatesAt + kWarps * kSlice * 4, kLengthsAt = kBetasAt + kChunk * 4;
static_assert(kBetasAt + kDeltaRule * 3 * kChunk * 4 == Config::shared_bytes);
constexpr int kScorePitch = pitch_of<2>(kChunk);
constexpr int kSystemAt = kChunk * kScorePitch, kInverseAt = kSystemAt + Triangle::kBytes;
static_assert((kDeltaRule ? kInverseAt + Triangle::kBytes : kSystemAt) <= kBetasAt, "there is room");

class PrepareKeys {
public:
    FA_DEVICE PrepareKeys(const ChunkParams& p, const Sequence& sequence, int chunk, int head)
        : p_(p),
          warp_(warp_index()),
          rows_(sequence.length - chunk * kChunk - own_token()),
          slot_(static_cast<int>(slot_of(p, sequence, head)) + chunk) {
        const int key_head = quotient(head, p.group_size), token = sequence.first + chunk * kChunk + own_token();
        const int64_t batch = sequence.batch, row = token;
        q_ = p.q + batch * p.q_stride_batch + row * p.q_stride_row + key_head * p.q_stride_head + own_column();
        k_ = p.k + batch * p.k_stride_batch + row * p.k_stride_row + key_head * p.k_stride_head + own_column();
        g_ = static_cast<const KeyGates::Number*>(p.g) + batch * p.g_stride_batch + row * p.g_stride_row +
             head * p.g_stride_head + own_column();
        if constexpr (kDeltaRule) leave_beta(sequence, chunk, head);
    }

    FA_DEVICE void run() {
        if constexpr (kDeltaRule) find_lengths();
#pragma unroll 1
        for (int column = 0; column < kHeaddim; column += kSlice) add_slice(read(column), column);
        cta_barrier();
        leave_scores();
        cta_barrier();
        write_scores();
        if constexpr (kDeltaRule) {
            triangle().invert();
            write_inverse(triangle(), p_, slot_);
        }
    }

private:
    using Products = float[1][kGroup / 8][Arch::kElements];
    using KeyGates = Gates<kGateFormat>;

    // Four columns of a subchunk, which a lane reads, as they are in memory.
    struct Bits {
        Words2 queries[kSubchunk], keys[kSubchunk];
        KeyGates::Words gates[kSubchunk];
    };

    // Queries and asking keys times the gates of the subchunk up to theirs, keys times the gates after them, and the product
    // of all gates.
    struct Subchunk {
        Four queries[kSubchunk], asking[kSubchunk], keys[kSubchunk], gates;
    };

    // Products of the gates of a part: of those before the lane's subchunk, of those after it, and of all.
    struct Part {
        Four before, behind, gates;

        // Joins this part with its neighbour: the part before it if this is the second of two, otherwise the part after it.
        FA_DEVICE void join(const Four& other, bool is_second) {
            before = chosen(is_second, before * other, before);
            behind = chosen(is_second, behind, behind * other);
            gates = gates * other;
        }
    };

    // Half a warp processes a subchunk.
    static FA_DEVICE int own_subchunk() { return lane_index() >> 4; }
    static FA_DEVICE int own_column() { return (lane_index() & 15) * 4; }
    FA_DEVICE int own_token() const { return (warp_ * 2 + own_subchunk()) * kSubchunk; }

    FA_DEVICE uint32_t tile(int size, int row) const { return memory_ + size * kTileBytes + row * kPitch; }
    FA_DEVICE uint32_t gates_of_warp(int warp) const { return memory_ + kGatesAt + warp * kSlice * 4 + own_column() * 4; }
    FA_DEVICE uint32_t beta(int token) const { return memory_ + kBetasAt + token * 4; }
    // The inverses of lengths of the lane's four keys, or of its queries.
    FA_DEVICE uint32_t lengths(bool of_queries) const {
        return memory_ + kLengthsAt + (of_queries * kChunk + own_token()) * 4;
    }
    FA_DEVICE Triangle triangle() const { return {memory_ + kSystemAt, memory_ + kInverseAt}; }

    // Stores the beta of a thread's token in shared memory and in factors.
    FA_DEVICE void leave_beta(const Sequence& sequence, int chunk, int head) const {
        const int token = thread_index();
        if (token >= kChunk) return;
        const float x = TokenScalars(p_, sequence, chunk, head).beta();
        store_number(beta(token), x);
        p_.factors[static_cast<int64_t>(slot_) * kFactors + factor_of_token(kBetas, token)] = x;
    }

    // Computes the inverses of the lengths of the lane's tokens, whose rows are read once more afterwards.
    FA_DEVICE void find_lengths() {
        Four queries(1.0f), keys(1.0f);
        if (p_.normalizes) {
            queries = keys = Four(0.0f);
#pragma unroll 1
            for (int column = 0; column < kHeaddim; column += kSlice) {
                const Bits bits = read(column);
#pragma unroll
                for (int row = 0; row < kSubchunk; ++row)
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const float query = element_of(bits.queries[row], i), key = element_of(bits.keys[row], i);
                        queries.x[row] += query * query;
                        keys.x[row] += key * key;
                    }
            }
            q_ -= kHeaddim;
            k_ -= kHeaddim;
            g_ -= kHeaddim;
#pragma unroll
            for (int row = 0; row < kSubchunk; ++row) {
                queries.x[row] = reciprocal_root(sum_of_lanes<16>(queries.x[row]) + kLengthEpsilon);
                keys.x[row] = reciprocal_root(sum_of_lanes<16>(keys.x[row]) + kLengthEpsilon);
            }
        }
        if (own_column() == 0) {
            store_shared_128(lengths(true), queries.words());
            store_shared_128(lengths(false), keys.words());
        }
        warp_barrier();
    }

    // Reads the next slice, which the L2 cache prefetched with the previous one. Rows of q, k and g have the same columns:
    // chunk_call.py aligns all of them.
    FA_DEVICE Bits read(int column) {
        const int rows = column + own_column() < p_.columns_k ? rows_ : 0;
        const int g_stride_row = static_cast<int>(p_.g_stride_row);  // the stride of aligned rows is small enough
        Bits bits = {};
#pragma unroll
        for (int row = 0; row < kSubchunk; ++row) {
            if (row >= rows) continue;
            bits.queries[row] = load_global_64(q_ + static_cast<int64_t>(p_.q_stride_row) * row);
            bits.keys[row] = load_global_64(k_ + static_cast<int64_t>(p_.k_stride_row) * row);
            bits.gates[row] = KeyGates::read(g_ + static_cast<int64_t>(g_stride_row) * row);
        }
        q_ += kSlice;
        k_ += kSlice;
        g_ += kSlice;
        return bits;
    }

    // Between the two barriers, warps can read the gates of all others.
    FA_DEVICE void add_slice(const Bits& bits, int column) {
        Subchunk subchunk;
        multiply_subchunk(bits, subchunk);
        Part part = {Four(1.0f), Four(1.0f), subchunk.gates};
        leave(0, subchunk, part);
        join_lanes(part, own_subchunk() == 1);
        leave(1, subchunk, part);
        if (own_subchunk() == 0) store_shared_128(gates_of_warp(warp_), part.gates.words());
        cta_barrier();
        join_warps<1>(part);
        leave(2, subchunk, part);
        join_warps<2>(part);
        if constexpr (kSizes == 4) {
            leave(3, subchunk, part);
            join_warps<4>(part);
        }
        write(subchunk, part, column);
        multiply<true>();  // later than it could, as the subchunk took most registers
        cta_barrier();
        multiply<false>();
    }

    // Keys are multiplied with one query after the other, and before each by the gate of its token.
    FA_DEVICE void multiply_subchunk(const Bits& bits, Subchunk& subchunk) {
        float sums[kSubchunk * kSubchunk] = {};  // scores; above the diagonal is L, transposed
        Four of_queries, of_keys;
        if constexpr (kDeltaRule) {
            of_queries = Four::load(lengths(true));
            of_keys = Four::load(lengths(false));
        }
#pragma unroll
        for (int column = 0; column < 4; ++column) {
            float keys[kSubchunk], since = 1.0f;
#pragma unroll
            for (int row = 0; row < kSubchunk; ++row) {
                const float gate =
                    exp2_approximate(widen_bits(KeyGates::bits(bits.gates[row], column), kGateFormat) * kLog2E);
                float query = element_of(bits.queries[row], column), key = element_of(bits.keys[row], column);
                if constexpr (kDeltaRule) {
                    query *= of_queries.x[row];
                    key *= of_keys.x[row];
                }
                keys[row] = key;
#pragma unroll
                for (int i = 0; i < row; ++i) keys[i] *= gate;
#pragma unroll
                for (int i = 0; i <= row; ++i) sums[row * kSubchunk + i] += query * keys[i];
                since *= gate;
                subchunk.queries[row].x[column] = query * since;
                if constexpr (kDeltaRule) {
#pragma unroll
                    for (int i = 0; i < row; ++i) sums[i * kSubchunk + row] += key * keys[i];
                    subchunk.asking[row].x[column] = key * since;
                }
            }
#pragma unroll
            for (int row = 0; row < kSubchunk; ++row) subchunk.keys[row].x[column] = keys[row];
            subchunk.gates.x[column] = since;
        }
        own_sum_ += own_sum_of_lanes(sums);
    }

    // Stores queries and asking keys of the second of two parts, or keys of the first.
    FA_DEVICE void leave(int size, const Subchunk& subchunk, const Part& part) const {
        constexpr int kQueriesAt = kQueryRows * kSectionBytes, kAskingAt = kAskingRows * kSectionBytes;
        if (size == 0) {  // lanes of a warp differ
            const bool second = own_subchunk() == 1;
            const uint32_t to = tile(0, warp_ * kSubchunk) + own_column() * 2;
#pragma unroll
            for (int row = 0; row < kSubchunk; ++row)
                store_shared_64(to + (second ? kQueriesAt : 0) + row * kPitch,
                                chosen(second, subchunk.queries[row], subchunk.keys[row]).packed());
            if (kDeltaRule && second) leave_rows(to + kAskingAt, subchunk.asking, part.before);
            return;
        }
        const int warps = 1 << (size - 1), parts = warp_ / warps;  // warps of a part, and parts before the warp's own
        const uint32_t to = tile(size, (warp_ - (parts + 1) / 2 * warps) * 2 * kSubchunk) +
                            own_subchunk() * kSubchunk * kPitch + own_column() * 2;
        if (parts % 2) {
            leave_rows(to + kQueriesAt, subchunk.queries, part.before);
            if constexpr (kDeltaRule) leave_rows(to + kAskingAt, subchunk.asking, part.before);
        } else {
            leave_rows(to, subchunk.keys, part.behind);
        }
    }

    static FA_DEVICE void leave_rows(uint32_t to, const Four (&rows)[kSubchunk], const Four& factors) {
#pragma unroll
        for (int row = 0; row < kSubchunk; ++row) store_shared_64(to + row * kPitch, (rows[row] * factors).packed());
    }

    // Joins the parts of the two halves of a warp.
    static FA_DEVICE void join_lanes(Part& part, bool is_second) {
        Four other;
#pragma unroll
        for (int i = 0; i < 4; ++i) other.x[i] = shuffle_xor(part.gates.x[i], 16);
        part.join(other, is_second);
    }

    // Joins parts of kCount warps each.
    template <int kCount>
    FA_DEVICE void join_warps(Part& part) const {
        const int first = (warp_ / kCount ^ 1) * kCount;
        Four other = Four::load(gates_of_warp(first));
#pragma unroll
        for (int warp = 1; warp < kCount; ++warp) other = other * Four::load(gates_of_warp(first + warp));
        part.join(other, warp_ / kCount % 2);
    }

    FA_DEVICE void write(const Subchunk& subchunk, const Part& part, int first_column) const {
        const int column = first_column + own_column();
        const int64_t chunk_at = static_cast<int64_t>(slot_) * (kChunk * kHeaddim);
        const int at = own_token() * kHeaddim + column;
        uint16_t* const queries = p_.q_scaled + chunk_at + at;
        uint16_t* const keys = p_.k_scaled + chunk_at * (1 + kDeltaRule) + at;
        const Four before = part.before * Four(p_.scale);
#pragma unroll
        for (int row = 0; row < kSubchunk; ++row) {
            store_global_64(queries + row * kHeaddim, (subchunk.queries[row] * before).packed());
            store_global_64(keys + row * kHeaddim, (subchunk.keys[row] * part.behind).packed());
            if constexpr (kDeltaRule)
                store_global_64(keys + (kChunk + row) * kHeaddim, (subchunk.asking[row] * part.before).packed());
        }
        if (own_token() == 0)
            store_global_128(p_.factors + static_cast<int64_t>(slot_) * kFactors + column, part.gates.words());
    }

    // Calls visit(products, task) for the warp's tasks among the first kInnerTasks, or among the others.
    template <bool kInner, class Visit>
    FA_DEVICE void for_each_task(Visit visit) {
        constexpr int kFirst = kInner ? 0 : kInnerTasks, kEnd = kInner ? kInnerTasks : kTasks;
#pragma unroll
        for (int turn = kFirst / kWarps; turn * kWarps < kEnd; ++turn) {
            const int index = turn * kWarps + warp_;
            if (index >= kFirst && index < kEnd) visit(products_[turn], task_at(index));
        }
    }

    template <bool kInner>
    FA_DEVICE void multiply() {
        for_each_task<kInner>([&](Products& products, Task task) { multiply(products, task); });
    }

    FA_DEVICE void multiply(Products& products, Task task) const {
        typename Arch::template Rows<1, kSlice> rows;
        rows.load(tile(task.size, task.first_row()));
        Arch::multiply_rows(products, rows, tile(task.size, task.first_key()));
    }

    FA_DEVICE uint32_t score(int row, int column) const { return memory_ + row * kScorePitch + column * 2; }

    FA_DEVICE void leave_scores() {
        leave_subchunks();
        const auto leave = [&](const Products& products, Task task) { leave_products(products, task); };
        for_each_task<true>(leave);
        for_each_task<false>(leave);
    }

    // Stores scores and L within subchunks. Scores are read eight columns at once, so zeros follow them.
    FA_DEVICE void leave_subchunks() const {
        const int row = lane_index() % 16 / kSubchunk, column = lane_index() % kSubchunk, first = own_token();
        const bool is_score = column <= row;
        const float x = is_score ? own_sum_ * p_.scale : 0.0f, next = shuffle_xor(x, 1);
        if (column % 2 == 0) {
            store_shared_32(score(first + row, first + column), Operand::pack(x, next));
            if (own_subchunk() == 0) store_shared_32(score(first + row, first + column + kSubchunk), 0);
        }
        if constexpr (kDeltaRule)
            triangle().store(first + column, first + row, is_score ? 0.0f : load_number(beta(first + column)) * own_sum_);
    }

    // Stores scores of queries of a second part, or L of asking keys, with keys of the part before it.
    FA_DEVICE void leave_products(const Products& products, Task task) const {
        const Parts parts(task.size);
#pragma unroll
        for (int n = 0; n < kGroup / 8; ++n)
#pragma unroll
            for (int i = 0; i < Arch::kElements; i += 2) {
                const int tile_row = task.first_row() + Arch::row(Arch::row_of_element(i));
                const int kind = tile_row / kSection, row = tile_row % kSection;
                const int key = task.first_key() + Arch::score_column(n, i);
                if (kind == kKeyRows || parts.of_row(row) != parts.of_row(key)) continue;
                const int to = parts.query(row), column = parts.key(key);
                const float* pair = &products[0][n][i];
                if (kind == kQueryRows) {
                    store_shared_32(score(to, column), Operand::pack(pair[0] * p_.scale, pair[1] * p_.scale));
                } else {
                    const float factor = load_number(beta(to));
                    triangle().store_pair(to, column, factor * pair[0], factor * pair[1]);
                }
            }
    }

    FA_DEVICE void write_scores() const {
#pragma unroll
        for (int i = thread_index(); i < kChunk * (kChunk / 8); i += kThreads) {
            const int row = i / (kChunk / 8), column = i % (kChunk / 8) * 8;
            Words4 words = {};
            if (column <= row) words = load_shared_128(score(row, column));
            store_global_128(p_.scores + (static_cast<int64_t>(slot_) * kChunk + row) * kChunk + column, words);
        }
    }

    const ChunkParams& p_;
    const uint32_t memory_ = shared_memory();
    const int warp_;
    const int rows_;  // tokens from the lane's first one to the end of the sequence
    const int slot_;
    const uint16_t* q_;  // the lane's columns of the next slice
    const uint16_t* k_;
    const KeyGates::Number* g_;
    float own_sum_ = 0.0f;  // a score of the subchunk, or an element of L; 16 lanes share them
    Products products_[kTurns] = {};
};

}  // namespace fastattention

extern "C" FA_KERNEL void FA_LAUNCH_BOUNDS(fastattention::kThreads, fastattention::Config::min_ctas)
    fastattention_linear_prepare_keys(FA_PARAMETER fastattention::ChunkParams params) {
    using namespace fastattention;
    const int index = static_cast<int>(cta_index()), slot = quotient(index, params.nheads),
              head = index - slot * params.nheads;
    const Sequence sequence = sequence_of_slot(params, slot);
    const int chunk = slot - sequence.first_slot;
    if (chunk >= sequence.num_chunks()) return;
    PrepareKeys(params, sequence, chunk, head).run();
}
