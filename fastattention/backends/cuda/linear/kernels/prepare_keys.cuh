// Computes what does not depend on the state, for all chunks of tokens at once, with a gate for every key dimension. a(i, j)
// is the product of the gates of tokens j+1 to i, a vector, and a(i, -1) of all tokens of the chunk up to i:
//
//     q_scaled   scale a(i, -1) q_i                  factors   a(last, -1)
//     k_scaled   a(last, j) k_j                      scores    scale (a(i, j) q_i) . k_j  for j <= i
//
// Scores within a subchunk of 4 tokens are summed in float. Scores of tokens further apart come from matrix instructions: in
// parts of 4 tokens first, then of 8, 16 and 32, queries of every second part meet keys of the part before it.
//
//     tokens   0 1 2 3   4 5 6 7   8 ...      4: queries 4 to 7 with keys 0 to 3
//              ---4---   ---4---   ---        8: queries 8 to 15 with keys 0 to 7
//              --------8--------   ---       16: queries 16 to 31 with keys 0 to 15
//
// Queries are multiplied by all gates since their part began, keys by all gates after them until their part ends. These are
// products of gates, never quotients, so no factor exceeds 1 and strong gates do not overflow. Operands are rounded to 16
// bits once. Each size of parts has a tile with a row per token: its query in every second part, otherwise its key.
#pragma once

#include FA_ARCH_HEADER

#include "chunk.cuh"
#include "gates.cuh"
#include "lanes.cuh"
#include "numbers.cuh"

namespace fastattention {

constexpr int kSubchunk = 4, kGroup = 16, kGroups = kChunk / kGroup;
constexpr int kSlice = Config::slice_columns;  // columns of queries and keys at a time
constexpr int kGateFormat = Config::gate_format;
constexpr int kSizes = Config::num_sizes;  // of parts: kSubchunk << index
static_assert(kChunk == kSubchunk << kSizes && (kGroups == 4 || kGroups == 2), "two or four groups are joined");
static_assert(kWarps == kChunk / (2 * kSubchunk), "a warp has two subchunks");
static_assert(kHeaddim % kSlice == 0 && kChunk % Arch::kStepRows == 0, "slices and steps are whole");

// Shared memory holds tiles of all sizes and each warp's products of gates; scores later take their place.
constexpr int kPitch = pitch_of<2>(kSlice);
constexpr int kTileBytes = kChunk * kPitch;
constexpr int kScorePitch = pitch_of<2>(kChunk);
static_assert(kSizes * kTileBytes + kWarps * kSlice * 4 == Config::shared_bytes);
static_assert(kChunk * kScorePitch <= Config::shared_bytes, "there is room");

// Values of four neighbouring columns.
struct Four {
    float x[4];

    Four() = default;
    explicit FA_DEVICE Four(float all) : x{all, all, all, all} {}

    static FA_DEVICE Four load(uint32_t at) {
        const Words4 words = load_shared_128(at);
        Four result;
#pragma unroll
        for (int i = 0; i < 4; ++i) result.x[i] = as_float(words.word[i]);
        return result;
    }

    FA_DEVICE Words4 words() const { return {as_bits(x[0]), as_bits(x[1]), as_bits(x[2]), as_bits(x[3])}; }
    FA_DEVICE Words2 packed() const { return {Operand::pack(x[0], x[1]), Operand::pack(x[2], x[3])}; }
};

FA_DEVICE Four operator*(const Four& a, const Four& b) {
    Four result;
#pragma unroll
    for (int i = 0; i < 4; ++i) result.x[i] = a.x[i] * b.x[i];
    return result;
}

FA_DEVICE Four chosen(bool first, const Four& a, const Four& b) {
    Four result;
#pragma unroll
    for (int i = 0; i < 4; ++i) result.x[i] = first ? a.x[i] : b.x[i];
    return result;
}

FA_DEVICE uint32_t half_of(const Words2& words, int i) { return words.word[i / 2] >> i % 2 * 16 & 0xffffu; }

// Reads gates from memory, four neighbours at once.
template <int kFormat>
struct Gates {
    using Number = uint16_t;
    using Words = Words2;
    static FA_DEVICE Words read(const Number* at) { return load_global_64(at); }
    static FA_DEVICE uint32_t bits(const Words& words, int i) { return half_of(words, i); }
};
template <>
struct Gates<kFloat32> {
    using Number = float;
    using Words = Words4;
    static FA_DEVICE Words read(const Number* at) { return load_global_128(at); }
    static FA_DEVICE uint32_t bits(const Words& words, int i) { return words.word[i]; }
};

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
    }

    FA_DEVICE void run() {
#pragma unroll 1
        for (int column = 0; column < kHeaddim; column += kSlice) add_slice(read(column), column);
        cta_barrier();
        leave_scores();
        cta_barrier();
        write_scores();
    }

private:
    using Products = float[1][kGroup / 8][Arch::kElements];
    using KeyGates = Gates<kGateFormat>;

    // Four columns of a block, which a lane reads, as they are in memory: four columns of a subchunk.
    struct Bits {
        Words2 queries[kSubchunk], keys[kSubchunk];
        KeyGates::Words gates[kSubchunk];
    };

    // Queries times the gates of the subchunk up to theirs, keys times the gates after them, and the product of all gates.
    struct Subchunk {
        Four queries[kSubchunk], keys[kSubchunk], gates;
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
    FA_DEVICE uint32_t gates_of_warp(int warp) const {
        return memory_ + kSizes * kTileBytes + warp * kSlice * 4 + own_column() * 4;
    }

    // Reads the next slice, which the L2 cache prefetched with the previous one. Rows of q, k and g have the same columns: chunk_call.py
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
        leave(0, own_subchunk() == 1, subchunk, part);
        join_lanes(part, own_subchunk() == 1);
        leave(1, warp_ % 2, subchunk, part);
        if (own_subchunk() == 0) store_shared_128(gates_of_warp(warp_), part.gates.words());
        cta_barrier();
        multiply(inner_, inner_task());
        join_warps<1>(part);
        leave(2, warp_ / 2 % 2, subchunk, part);
        join_warps<2>(part);
        if constexpr (kGroups == 4) {
            leave(3, warp_ / 4, subchunk, part);
            join_warps<4>(part);
        }
        write(subchunk, part, column);
        cta_barrier();
        if (has_outer_task()) multiply(outer_, outer_task());
    }

    // Keys are multiplied with one query after the other, and before each by the gate of its token.
    FA_DEVICE void multiply_subchunk(const Bits& bits, Subchunk& subchunk) {
#pragma unroll
        for (int column = 0; column < 4; ++column) {
            float keys[kSubchunk], since = 1.0f;
#pragma unroll
            for (int row = 0; row < kSubchunk; ++row) {
                const float gate =
                    exp2_approximate(widen_bits(KeyGates::bits(bits.gates[row], column), kGateFormat) * kLog2E);
                const float query = Element::widen(static_cast<uint16_t>(half_of(bits.queries[row], column)));
                keys[row] = Element::widen(static_cast<uint16_t>(half_of(bits.keys[row], column)));
#pragma unroll
                for (int i = 0; i < row; ++i) keys[i] *= gate;
#pragma unroll
                for (int i = 0; i <= row; ++i) scores_[row].x[i] += query * keys[i];
                since *= gate;
                subchunk.queries[row].x[column] = query * since;
            }
#pragma unroll
            for (int row = 0; row < kSubchunk; ++row) subchunk.keys[row].x[column] = keys[row];
            subchunk.gates.x[column] = since;
        }
    }

    // Stores queries of the second of two parts, or keys of the first.
    FA_DEVICE void leave(int size, bool is_second, const Subchunk& subchunk, const Part& part) const {
        const uint32_t to = tile(size, own_token()) + own_column() * 2;
        if (size == 0) {  // lanes of a warp differ
#pragma unroll
            for (int row = 0; row < kSubchunk; ++row)
                store_shared_64(to + row * kPitch, chosen(is_second, subchunk.queries[row], subchunk.keys[row]).packed());
        } else if (is_second) {
#pragma unroll
            for (int row = 0; row < kSubchunk; ++row)
                store_shared_64(to + row * kPitch, (subchunk.queries[row] * part.before).packed());
        } else {
#pragma unroll
            for (int row = 0; row < kSubchunk; ++row)
                store_shared_64(to + row * kPitch, (subchunk.keys[row] * part.behind).packed());
        }
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
        const int64_t at = (static_cast<int64_t>(slot_) * kChunk + own_token()) * kHeaddim + column;
        const Four before = part.before * Four(p_.scale);
#pragma unroll
        for (int row = 0; row < kSubchunk; ++row) {
            store_global_64(p_.q_scaled + at + row * kHeaddim, (subchunk.queries[row] * before).packed());
            store_global_64(p_.k_scaled + at + row * kHeaddim, (subchunk.keys[row] * part.behind).packed());
        }
        if (own_token() == 0)
            store_global_128(p_.factors + static_cast<int64_t>(slot_) * kHeaddim + column, part.gates.words());
    }

    // Volta multiplies the rows of two groups at once.
    static FA_DEVICE int first_row(int group) { return group * kGroup / Arch::kStepRows * Arch::kStepRows; }

    // Products that a warp computes: in parts of one size, of queries of one group and keys of the same or another group.
    struct Task {
        int size, group, key_group;
    };

    // The task for parts of 4 or 8 tokens.
    FA_DEVICE Task inner_task() const { return {warp_ % 2, warp_ / 2, warp_ / 2}; }

    // Tasks for parts of 32 or 16 tokens.
    static constexpr int kOfLargest = kGroups == 4 ? 4 : 0, kOuterTasks = kOfLargest + kGroups / 2;
    FA_DEVICE bool has_outer_task() const { return warp_ < kOuterTasks; }
    FA_DEVICE Task outer_task() const {
        if (warp_ < kOfLargest) return {3, 2 + warp_ % 2, warp_ / 2};
        const int key_group = (warp_ - kOfLargest) * 2;
        return {2, key_group + 1, key_group};
    }

    FA_DEVICE void multiply(Products& products, Task task) const {
        typename Arch::template Rows<1, kSlice> rows;
        rows.load(tile(task.size, first_row(task.group)));
        Arch::multiply_rows(products, rows, tile(task.size, task.key_group * kGroup));
    }

    FA_DEVICE uint32_t score(int row, int column) const { return memory_ + row * kScorePitch + column * 2; }

    FA_DEVICE void leave_scores() {
        leave_subchunks();
        leave_products(inner_, inner_task());
        if (has_outer_task()) leave_products(outer_, outer_task());
    }

    // Stores scores within subchunks. They are read eight columns at once, so zeros follow those of the first of two.
    FA_DEVICE void leave_subchunks() {
#pragma unroll
        for (int row = 0; row < kSubchunk; ++row) {
#pragma unroll
            for (int i = 0; i <= row; ++i) scores_[row].x[i] = sum_of_lanes<16>(scores_[row].x[i]);
            const Words2 packed = (scores_[row] * Four(p_.scale)).packed();
            const uint32_t to = score(own_token() + row, own_token());
            if (lane_index() == 0) store_shared_128(to, {packed.word[0], packed.word[1]});
            if (lane_index() == 16) store_shared_64(to, packed);
        }
    }

    // Stores scores of queries of a second part with keys of the part before it.
    FA_DEVICE void leave_products(const Products& products, Task task) const {
        static_assert(Arch::kStepRows == kGroup || kGroups == 2, "all of the largest size are");
        const int first_key = task.key_group * kGroup, first_query = first_row(task.group) - first_key;
#pragma unroll
        for (int n = 0; n < kGroup / 8; ++n)
#pragma unroll
            for (int i = 0; i < Arch::kElements; i += 2) {
                const int row = first_query + Arch::row(Arch::row_of_element(i)), column = Arch::score_column(n, i);
                const int part = column / kSubchunk >> task.size, part_of_query = row >> task.size + 2;
                if (task.size == 3 || (part % 2 == 0 && part_of_query == part + 1))
                    store_shared_32(score(first_key + row, first_key + column),
                                    Operand::pack(products[0][n][i] * p_.scale, products[0][n][i + 1] * p_.scale));
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
    Four scores_[kSubchunk] = {};  // scores of queries with keys of their subchunk
    Products inner_ = {}, outer_ = {};
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
