// Of every chunk of tokens what depends on no state, with a gate for every key dimension; all chunks at once. With a(i, j) the
// products of the gates of tokens j+1 to i, which are vectors, and -1 for all tokens of the chunk up to i:
//
//     q_scaled   scale a(i, -1) q_i                  factors   a(last, -1)
//     k_scaled   a(last, j) k_j                      scores    scale (a(i, j) q_i) . k_j  for j <= i
//
// Tokens are in groups of 16. Scores within a group are sums over its gates, one by one. For those of queries of group s with
// keys before it, a(i, j) is a product of two vectors, of the gates since s began and of those before: none exceeds 1, and
// what strong gates make vanish was to vanish. All in float, a slice of key dimensions at a time: on every code path.
#pragma once

#include "chunk.cuh"
#include "numbers.cuh"

namespace fastattention {

constexpr int kHeaddim = FA_HEADDIM;  // the call's, rounded up
constexpr int kThreads = 2 * kChunk;  // a warp for each group
constexpr int kMinCtas = 512 / kThreads;  // as many as shared memory holds on most GPUs
constexpr int kGroup = 16, kGroups = kChunk / kGroup;
constexpr int kSlice = 64;
static_assert(kHeaddim % kSlice == 0 && kChunk % kGroup == 0, "slices and groups are whole");

// Rows of queries, keys and gates; then scores.
constexpr int kPitch = (kSlice + 4) * 4;  // eight neighbouring rows, 16 bytes each, are in different banks
constexpr int kRowsBytes = kChunk * kPitch;
constexpr int kScorePitch = (kChunk + 4) * 4;
constexpr int kSharedMemory = 3 * kRowsBytes;
static_assert(kChunk * kScorePitch <= kSharedMemory && kSharedMemory == FA_SHARED_BYTES, "chunk_config.py computes the same");

// Neighbouring numbers in shared memory.
struct Four {
    float x[4];

    explicit FA_DEVICE Four(uint32_t at) {
        const Words4 words = load_shared_128(at);
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = as_float(words.word[i]);
    }

    FA_DEVICE void add_product_to(float& sum, const Four& other) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) sum += x[i] * other.x[i];
    }
};

class PrepareKeys {
public:
    FA_DEVICE PrepareKeys(const ChunkParams& p, const Sequence& sequence, int chunk, int head)
        : p_(p), sequence_(sequence), head_(head), first_(chunk * kChunk), slot_(slot_of(p, sequence, head) + chunk) {}

    FA_DEVICE void run() {
#pragma unroll 1
        for (int column = 0; column < kHeaddim; column += kSlice) {
            if (column > 0) cta_barrier();
            read(column);
            cta_barrier();
            multiply_within_groups();
            cta_barrier();
            multiply_gates();
            multiply_groups();
            write(column);
        }
        cta_barrier();
        leave_scores();
        cta_barrier();
        write_scores();
    }

private:
    // Of the queries of a thread, and of the groups before theirs.
    static constexpr int kQueries = kGroup * kGroup / kThreads;

    // Asked anew in each loop over a slice: addresses of others would fill registers meanwhile.
    static FA_DEVICE int thread() { return opaque(thread_index()); }

    FA_DEVICE uint32_t query(int row, int column = 0) const { return memory_ + row * kPitch + column * 4; }
    FA_DEVICE uint32_t key(int row, int column = 0) const { return query(row, column) + kRowsBytes; }
    FA_DEVICE uint32_t gate(int row, int column = 0) const { return query(row, column) + 2 * kRowsBytes; }
    // What all gates of a group make, in the place of its first.
    FA_DEVICE uint32_t product(int group, int column) const { return gate(group * kGroup, column); }

    static FA_DEVICE float load(uint32_t at) { return as_float(load_shared_32(at)); }
    static FA_DEVICE void store(uint32_t at, float x) { store_shared_32(at, as_bits(x)); }
    static FA_DEVICE void scale(uint32_t at, float factor) { store(at, load(at) * factor); }

    FA_DEVICE void read(int first_column) const {
        const int key_head = head_ / p_.group_size;
        read_rows(p_.q + sequence_.offset(p_.q_stride_batch, p_.q_stride_row, p_.q_stride_head, key_head), p_.q_stride_row,
                  first_column, query(0), p_.scale);
        read_rows(p_.k + sequence_.offset(p_.k_stride_batch, p_.k_stride_row, p_.k_stride_head, key_head), p_.k_stride_row,
                  first_column, key(0), 1.0f);
        // The format is asked for once: loads that branches part do not overlap.
        if (p_.gate_format == 0) {
            read_gates<0>(first_column);
        } else if (p_.gate_format == 1) {
            read_gates<1>(first_column);
        } else {
            read_gates<2>(first_column);
        }
    }

    template <int kFormat>
    FA_DEVICE void read_gates(int first_column) const {
        const int64_t first = sequence_.offset(p_.g_stride_batch, p_.g_stride_row, p_.g_stride_head, head_) + first_column;
        const int rows = sequence_.length - first_, columns = p_.headdim_k - first_column;
        const int column = thread() % kSlice, first_row = thread() / kSlice;
#pragma unroll 16
        for (int i = 0; i < kChunk * kSlice / kThreads; ++i) {
            const int row = first_row + i * (kThreads / kSlice);
            const bool exists = row < rows && column < columns;
            const float log = exists ? number_at<kFormat>(p_.g, first + (first_ + row) * p_.g_stride_row + column) : 0.0f;
            store(gate(row, column), exp2_approximate(log * kLog2E));
        }
    }

    FA_DEVICE void read_rows(const uint16_t* base, int stride_row, int first_column, uint32_t to, float factor) const {
        const int column = thread() % (kSlice / 8) * 8, first_row = thread() / (kSlice / 8);
#pragma unroll
        for (int i = 0; i < kChunk * (kSlice / 8) / kThreads; ++i) {
            const int row = first_row + i * (kThreads / (kSlice / 8));
            const bool exists = first_ + row < sequence_.length && first_column + column < p_.columns_k;
            const Words4 words =
                exists ? load_global_128(base + static_cast<int64_t>(first_ + row) * stride_row + first_column + column)
                       : Words4{};
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                Words4 wide;
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    wide.word[j] =
                        as_bits(Element::widen(static_cast<uint16_t>(words.word[half * 2 + j / 2] >> j % 2 * 16)) * factor);
                store_shared_128(to + row * kPitch + (column + half * 4) * 4, wide);
            }
        }
    }

    // Half a warp has a group's keys, one a lane, and half of the columns: a key meets one query after the other, and before
    // each the gate of that token. What it finds with queries before it is not used.
    FA_DEVICE void multiply_within_groups() {
        const int index = thread(), first = index / 32 * kGroup, own = index % kGroup;
        const int begin = index % 32 / kGroup * (kSlice / 2);
#pragma unroll 1
        for (int column = begin; column < begin + kSlice / 2; column += 4) {
            Four gated(key(first + own, column));
#pragma unroll
            for (int row = 0; row < kGroup; ++row) {
                const Four gates(gate(first + row, column));
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    if (row > own) gated.x[i] *= gates.x[i];
                gated.add_product_to(within_[row], Four(query(first + row, column)));
            }
        }
    }

    // Queries by all gates since their group began, keys by those behind them to its end. A thread has a column of a group.
    FA_DEVICE void multiply_gates() const {
        for (int i = thread(); i < kGroups * kSlice; i += kThreads) {
            const int first = i / kSlice * kGroup, column = i % kSlice;
            float before = 1.0f, behind = 1.0f;
#pragma unroll
            for (int row = 0; row < kGroup; ++row) {
                before *= load(gate(first + row, column));
                scale(query(first + row, column), before);
                const int last = kGroup - 1 - row;
                scale(key(first + last, column), behind);
                behind *= load(gate(first + last, column));
            }
            store(product(first / kGroup, column), before);
        }
        cta_barrier();
    }

    // Queries of each group with all keys before it, which then take its gates too.
    FA_DEVICE void multiply_groups() {
        const int index = thread(), row = index / kGroup, other = index % kGroup;
#pragma unroll
        for (int group = 1; group < kGroups; ++group) {
#pragma unroll 2
            for (int column = 0; column < kSlice; column += 4) {
#pragma unroll
                for (int i = 0; i < kQueries; ++i) {
                    const Four own(query(group * kGroup + row + i * (kGroup / kQueries), column));
#pragma unroll
                    for (int before = 0; before < group; ++before)
                        own.add_product_to(between_[group][before][i], Four(key(before * kGroup + other, column)));
                }
            }
            cta_barrier();
            for (int i = thread(); i < group * kGroup * kSlice; i += kThreads)
                scale(key(i / kSlice, i % kSlice), load(product(group, i % kSlice)));
            cta_barrier();
        }
    }

    // Queries take the gates of groups before theirs on the way.
    FA_DEVICE void write(int first_column) const {
        const int64_t at = slot_ * kChunk * kHeaddim + first_column;
        for (int i = thread(); i < kChunk * (kSlice / 8); i += kThreads) {
            const int row = i / (kSlice / 8), column = i % (kSlice / 8) * 8;
            float queries[8], keys[8];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const Four q(query(row, column + half * 4)), k(key(row, column + half * 4));
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    queries[half * 4 + j] = q.x[j];
                    keys[half * 4 + j] = k.x[j];
                }
            }
            for (int group = 0; group < row / kGroup; ++group)
#pragma unroll
                for (int j = 0; j < 8; ++j) queries[j] *= load(product(group, column + j));
            store_global_128(p_.q_scaled + at + row * kHeaddim + column, packed(queries));
            store_global_128(p_.k_scaled + at + row * kHeaddim + column, packed(keys));
        }
        for (int column = thread(); column < kSlice; column += kThreads) {
            float all = 1.0f;
#pragma unroll
            for (int group = 0; group < kGroups; ++group) all *= load(product(group, column));
            p_.factors[slot_ * kHeaddim + first_column + column] = all;
        }
    }

    static FA_DEVICE Words4 packed(const float (&x)[8]) {
        Words4 words;
#pragma unroll
        for (int i = 0; i < 4; ++i) words.word[i] = Element::pack(x[2 * i], x[2 * i + 1]);
        return words;
    }

    FA_DEVICE uint32_t score(int row, int column) const { return memory_ + row * kScorePitch + column * 4; }

    FA_DEVICE void leave_scores() const {
        const int first = thread_index() / 32 * kGroup, own = thread_index() % kGroup;
#pragma unroll
        for (int row = 0; row < kGroup; ++row) {
            const float sum = within_[row] + shuffle_xor(within_[row], kGroup);
            if (row >= own && thread_index() % 32 < kGroup) store(score(first + row, first + own), sum);
        }
#pragma unroll
        for (int group = 1; group < kGroups; ++group)
#pragma unroll
            for (int before = 0; before < group; ++before)
#pragma unroll
                for (int i = 0; i < kQueries; ++i)
                    store(score(group * kGroup + thread_index() / kGroup + i * (kGroup / kQueries), before * kGroup + own),
                          between_[group][before][i]);
    }

    FA_DEVICE void write_scores() const {
        for (int i = thread_index(); i < kChunk * (kChunk / 8); i += kThreads) {
            const int row = i / (kChunk / 8), column = i % (kChunk / 8) * 8;
            float scores[8];
#pragma unroll
            for (int j = 0; j < 8; ++j) scores[j] = column + j <= row ? load(score(row, column + j)) : 0.0f;
            store_global_128(p_.scores + (slot_ * kChunk + row) * kChunk + column, packed(scores));
        }
    }

    const ChunkParams& p_;
    const Sequence sequence_;
    const int head_, first_;  // first token, of the sequence
    const int64_t slot_;
    const uint32_t memory_ = shared_memory();
    float within_[kGroup] = {};  // of a key with the queries of its group
    float between_[kGroups][kGroups][kQueries] = {};  // by groups of queries and of keys
};

}  // namespace fastattention

extern "C" FA_KERNEL void FA_LAUNCH_BOUNDS(fastattention::kThreads, fastattention::kMinCtas)
    fastattention_linear_prepare_keys(FA_PARAMETER fastattention::ChunkParams params) {
    using namespace fastattention;
    let_next_kernel_start();
    const int slot = static_cast<int>(cta_index() / params.nheads), head = static_cast<int>(cta_index() % params.nheads);
    const Sequence sequence = sequence_of_slot(params, slot);
    const int chunk = slot - sequence.first_slot;
    if (chunk >= sequence.num_chunks()) return;
    PrepareKeys(params, sequence, chunk, head).run();
}
