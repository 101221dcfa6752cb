// Of every chunk of tokens what depends on no state, with a gate for every key dimension; all chunks at once. With a(i, j) the
// products of the gates of tokens j+1 to i, which are vectors, and -1 for all tokens of the chunk up to i:
//
//     q_scaled   scale a(i, -1) q_i                  factors   a(last, -1)
//     k_scaled   a(last, j) k_j                      scores    scale (a(i, j) q_i) . k_j  for j <= i
//
// Tokens are in blocks of 4, blocks in groups of 16. Gates join queries and keys in three steps: those of a block first, then
// those of a group, then all. Scores of each step are of queries by all gates since their part began, with keys by all gates
// behind them to the end of theirs, and by those of the parts between: no factor exceeds 1, and what strong gates make vanish
// was to vanish. All in float, a slice of key dimensions at a time: on every code path.
#pragma once

#include "chunk.cuh"
#include "numbers.cuh"

namespace fastattention {

constexpr int kHeaddim = FA_HEADDIM;  // the call's, rounded up
constexpr int kThreads = 2 * kChunk;  // a warp for each group
constexpr int kMinCtas = 512 / kThreads;  // as many as registers suffice for
constexpr int kBlock = 4, kGroup = 16, kGroups = kChunk / kGroup;
constexpr int kSlice = 64;
static_assert(kHeaddim % kSlice == 0 && kChunk == kGroups * kGroup, "slices and groups are whole");
static_assert(kGroups == 4 || kGroups == 2, "what warps share out");

// Rows of queries and keys, and of what the gates of a block make; then scores.
constexpr int kPitch = (kSlice + 4) * 4;  // eight neighbouring rows, 16 bytes each, are in different banks
constexpr int kRowsBytes = kChunk * kPitch;
constexpr int kScorePitch = (kChunk + 4) * 4;
constexpr int kSharedMemory = 2 * kRowsBytes + kRowsBytes / kBlock;
static_assert(kChunk * kScorePitch <= kSharedMemory && kSharedMemory == FA_SHARED_BYTES, "chunk_config.py computes the same");

// Neighbouring numbers in shared memory.
struct Four {
    float x[4];

    Four() = default;
    explicit FA_DEVICE Four(uint32_t at) {
        const Words4 words = load_shared_128(at);
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = as_float(words.word[i]);
    }

    FA_DEVICE void multiply(const Four& other) {
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] *= other.x[i];
    }

    FA_DEVICE void add_product_to(float& sum, const Four& other) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) sum += x[i] * other.x[i];
    }
};

class PrepareKeys {
public:
    FA_DEVICE PrepareKeys(const ChunkParams& p, const Sequence& sequence, int chunk, int head)
        : p_(p),
          batch_(sequence.batch),
          head_(head),
          first_(sequence.first + chunk * kChunk),
          rows_(sequence.length - chunk * kChunk),
          slot_(static_cast<int>(slot_of(p, sequence, head)) + chunk) {}

    FA_DEVICE void run() {
#pragma unroll 1
        for (int column = 0; column < kHeaddim; column += kSlice) {
            if (column > 0) cta_barrier();
            // The format is asked for once: loads that branches part do not overlap.
            if (p_.gate_format == 0) {
                multiply_blocks<0>(column);
            } else if (p_.gate_format == 1) {
                multiply_blocks<1>(column);
            } else {
                multiply_blocks<2>(column);
            }
            warp_barrier();
            multiply_group();
            warp_barrier();
            multiply_gates();
            cta_barrier();
            multiply_groups();
            write(column);
        }
        cta_barrier();
        leave_scores();
        cta_barrier();
        write_scores();
    }

private:
    static constexpr int kBlocks = kGroup / kBlock;
    static constexpr int kHalf = kSlice / 2;
    static constexpr int kStep = 16;  // columns that eight lanes read at once
    static constexpr int kQueries = 4;  // of a lane, of a part
    static constexpr int kKeys = kGroup * kGroup / 32 / kQueries;  // of a group, too

    // Asked anew in each loop over a slice: addresses of others would fill registers meanwhile. Known not to be negative.
    static FA_DEVICE int thread() { return opaque(thread_index()) & (kThreads - 1); }

    FA_DEVICE uint32_t query(int row, int column = 0) const { return memory_ + row * kPitch + column * 4; }
    FA_DEVICE uint32_t key(int row, int column = 0) const { return query(row, column) + kRowsBytes; }
    // What all gates of a block make that begins with a row, and later those of a group in the place of its first block.
    FA_DEVICE uint32_t product(int row, int column = 0) const {
        return memory_ + 2 * kRowsBytes + row / kBlock * kPitch + column * 4;
    }

    static FA_DEVICE float load(uint32_t at) { return as_float(load_shared_32(at)); }
    static FA_DEVICE void store(uint32_t at, float x) { store_shared_32(at, as_bits(x)); }
    static FA_DEVICE void scale(uint32_t at, float factor) { store(at, load(at) * factor); }

    // Two neighbouring columns of a block.
    struct Columns {
        uint32_t queries[kBlock], keys[kBlock];  // two of each
        float logs[2][kBlock];  // of gates
    };

    // Where a lane finds its next columns.
    struct Source {
        const uint16_t* q;
        const uint16_t* k;
        int64_t g;
        int column;
    };

    // A warp reads a group, and eight of its lanes a block, of which each has two columns at a time in registers. Lanes of
    // the second half of a group have theirs in reverse: both halves store at once.
    template <int kFormat>
    FA_DEVICE void multiply_blocks(int first_column) {
        const int index = thread(), key_head = head_ / p_.group_size, column = first_column + column_of(index);
        const int64_t token = first_ + row_of(index), batch = batch_;
        Source source = {
            p_.q + batch * p_.q_stride_batch + key_head * p_.q_stride_head + token * p_.q_stride_row + column,
            p_.k + batch * p_.k_stride_batch + key_head * p_.k_stride_head + token * p_.k_stride_row + column,
            batch * p_.g_stride_batch + head_ * p_.g_stride_head + token * p_.g_stride_row + column + reversed(index),
            column};
        Columns next = read<kFormat>(source);
#pragma unroll 1
        for (int at = 0; at < kSlice; at += kStep) {
            const Columns own = next;
            if (at + kStep < kSlice) next = read<kFormat>(source);
            multiply_block(own, at, 0);
            multiply_block(own, at, 1);
        }
    }

    static FA_DEVICE int row_of(int index) { return index / 8 * kBlock; }
    static FA_DEVICE int column_of(int index) { return index % 8 * 2; }
    static FA_DEVICE int reversed(int index) { return index / 16 % 2; }

    template <int kFormat>
    FA_DEVICE Columns read(Source& source) const {
        const int index = thread(), other = reversed(index);
        // Of rows and columns that exist. A row of queries and keys may have more columns than one of gates.
        const int rows = source.column < p_.columns_k ? rows_ - row_of(index) : 0;
        const int gates[2] = {source.column + other < p_.headdim_k ? rows : 0,
                              source.column + 1 - other < p_.headdim_k ? rows : 0};
        Columns result;
#pragma unroll
        for (int row = 0; row < kBlock; ++row) {
            const uint16_t* q = source.q + static_cast<int64_t>(p_.q_stride_row) * row;
            const uint16_t* k = source.k + static_cast<int64_t>(p_.k_stride_row) * row;
            const int64_t g = source.g + p_.g_stride_row * row;
            result.queries[row] = row < rows ? *reinterpret_cast<const uint32_t*>(q) : 0;
            result.keys[row] = row < rows ? *reinterpret_cast<const uint32_t*>(k) : 0;
            result.logs[0][row] = row < gates[0] ? number_at<kFormat>(p_.g, g) : 0.0f;
            result.logs[1][row] = row < gates[1] ? number_at<kFormat>(p_.g, g + 1 - 2 * other) : 0.0f;
        }
        source.q += kStep;
        source.k += kStep;
        source.g += kStep;
        source.column += kStep;
        return result;
    }

    // Keys meet one query after the other, and before each the gate of that token.
    FA_DEVICE void multiply_block(const Columns& own, int at, int which) {
        const int index = thread(), first = row_of(index), other = which ^ reversed(index);
        const int column = at + column_of(index) + other;
        float keys[kBlock], since = 1.0f;
#pragma unroll
        for (int row = 0; row < kBlock; ++row) {
            const float gate = exp2_approximate(own.logs[which][row] * kLog2E);
            const float scaled = Element::widen(static_cast<uint16_t>(own.queries[row] >> other * 16)) * p_.scale;
            keys[row] = Element::widen(static_cast<uint16_t>(own.keys[row] >> other * 16));
#pragma unroll
            for (int i = 0; i < row; ++i) keys[i] *= gate;
#pragma unroll
            for (int i = 0; i <= row; ++i) block_[row][i] += scaled * keys[i];
            since *= gate;
            store(query(first + row, column), scaled * since);
        }
#pragma unroll
        for (int row = 0; row < kBlock; ++row) store(key(first + row, column), keys[row]);
        store(product(first, column), since);
    }

    // Queries of kParts parts of rows with keys of parts before theirs, which take the gates of those between on the way. Of
    // four parts, some lanes have keys of the first, and `late` ones those of the second and then the third: as many pairs.
    template <int kPart, int kParts, int kPartKeys>
    FA_DEVICE void multiply_parts(float (&sums)[kParts - 1][kPartKeys][kQueries], int first, bool late, int own_key,
                                  int own_query, int first_column, int columns) const {
        constexpr int kKeyDistance = kPart / kPartKeys, kQueryDistance = kPart / kQueries;
        const uint32_t keys_at = key(first + own_key + (late ? kPart : 0), first_column);
        const uint32_t gates_at = product(first + (late ? 2 : 1) * kPart, first_column);
        const uint32_t queries_at = query(first + own_query + kPart, first_column);
#pragma unroll 1
        for (int at = 0; at < columns * 4; at += 16) {
            Four keys[kPartKeys];
#pragma unroll
            for (int i = 0; i < kPartKeys; ++i) keys[i] = Four(keys_at + at + i * kKeyDistance * kPitch);
#pragma unroll
            for (int step = 0; step < kParts - 1; ++step) {
                if (step == 2 && late) {
#pragma unroll
                    for (int i = 0; i < kPartKeys; ++i) keys[i] = Four(keys_at + at + (kPart + i * kKeyDistance) * kPitch);
                } else if (step > 0) {
                    const Four gates(gates_at + at + (step - 1) * (kPart / kBlock) * kPitch);
#pragma unroll
                    for (int i = 0; i < kPartKeys; ++i) keys[i].multiply(gates);
                }
                const uint32_t part = queries_at + at + (step + (late && step < 2)) * kPart * kPitch;
#pragma unroll
                for (int j = 0; j < kQueries; ++j) {
                    const Four own(part + j * kQueryDistance * kPitch);
#pragma unroll
                    for (int i = 0; i < kPartKeys; ++i) own.add_product_to(sums[step][i][j], keys[i]);
                }
            }
        }
    }

    // Blocks of the group of a warp. Eight lanes have a quarter of the columns, and of the sums that they add up one query.
    FA_DEVICE void multiply_group() {
        const int lane = thread() % 32, first = thread() / 32 * kGroup;
        float sums[kBlocks - 1][1][kQueries] = {};
        multiply_parts<kBlock, kBlocks, 1>(sums, first, has_late_block(lane), lane % kBlock, 0, lane / 8 * (kSlice / 4),
                                           kSlice / 4);
        const bool upper = lane & 16, odd = lane & 8;
#pragma unroll
        for (int step = 0; step < kBlocks - 1; ++step) {
            const float (&x)[kQueries] = sums[step][0];
            float pair[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) pair[i] = (upper ? x[2 + i] : x[i]) + shuffle_xor(upper ? x[i] : x[2 + i], 16);
            within_[step] += (odd ? pair[1] : pair[0]) + shuffle_xor(odd ? pair[0] : pair[1], 8);
        }
    }

    static FA_DEVICE bool has_late_block(int lane) { return lane / kBlock % 2 == 1; }

    // Queries by the gates of blocks of their group before theirs, keys by those of blocks behind. A lane has two columns.
    FA_DEVICE void multiply_gates() const {
        const int lane = thread() % 32, first = thread() / 32 * kGroup;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int column = lane + half * kHalf;
            float since = 1.0f, behind = 1.0f;
#pragma unroll
            for (int block = 1; block < kBlocks; ++block) {
                const int before = first + (block - 1) * kBlock, last = first + (kBlocks - block) * kBlock;
                since *= load(product(before, column));
                behind *= load(product(last, column));
#pragma unroll
                for (int row = 0; row < kBlock; ++row) {
                    scale(query(before + kBlock + row, column), since);
                    scale(key(last - kBlock + row, column), behind);
                }
            }
            store(product(first, column), since * load(product(first + kGroup - kBlock, column)));
        }
    }

    // Of two warps that have the same columns, each has half of the pairs.
    static FA_DEVICE bool has_late_keys(int index) { return kGroups == 4 && index / 32 % 2 == 1; }
    static FA_DEVICE int half_of(int index) { return index / 32 / (kGroups / 2); }

    FA_DEVICE void multiply_groups() {
        const int index = thread(), lane = index % 32;
        multiply_parts<kGroup, kGroups, kKeys>(between_, 0, has_late_keys(index), lane % 8, lane / 8, half_of(index) * kHalf,
                                               kHalf);
    }

    // Queries take the gates of groups before theirs on the way, keys those of groups behind. A thread has four columns.
    FA_DEVICE void write(int first_column) const {
        constexpr int kRows = kThreads / (kSlice / 4);  // at once
        const int index = thread(), column = index % (kSlice / 4) * 4, first = index / (kSlice / 4);
        const int64_t at = (static_cast<int64_t>(slot_) * kChunk + first) * kHeaddim + first_column + column;
        Four products[kGroups];
#pragma unroll
        for (int group = 0; group < kGroups; ++group) products[group] = Four(product(group * kGroup, column));
#pragma unroll
        for (int row = 0; row < kChunk; row += kRows) {
            Four queries(query(first + row, column)), keys(key(first + row, column));
#pragma unroll
            for (int group = 0; group < kGroups; ++group) {
                if (group < row / kGroup) queries.multiply(products[group]);
                if (group > row / kGroup) keys.multiply(products[group]);
            }
            store_global_64(p_.q_scaled + at + row * kHeaddim, packed(queries));
            store_global_64(p_.k_scaled + at + row * kHeaddim, packed(keys));
        }
        if (first > 0) return;
#pragma unroll
        for (int group = 1; group < kGroups; ++group) products[0].multiply(products[group]);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            p_.factors[static_cast<int64_t>(slot_) * kHeaddim + first_column + column + i] = products[0].x[i];
    }

    static FA_DEVICE Words2 packed(const Four& four) {
        return {Element::pack(four.x[0], four.x[1]), Element::pack(four.x[2], four.x[3])};
    }

    FA_DEVICE uint32_t score(int row, int column) const { return memory_ + row * kScorePitch + column * 4; }

    FA_DEVICE void leave_scores() {
        const int index = thread_index(), lane = index % 32, first = index / 32 * kGroup;
#pragma unroll
        for (int row = 0; row < kBlock; ++row)
#pragma unroll
            for (int i = 0; i < kBlock; ++i) {
                float sum = i <= row ? block_[row][i] : 0.0f;
#pragma unroll
                for (int mask = 1; i <= row && mask < 8; mask *= 2) sum += shuffle_xor(sum, mask);
                if (lane % 8 == 0) store(score(row_of(index) + row, row_of(index) + i), sum);
            }
        const bool late = has_late_block(lane);
#pragma unroll
        for (int step = 0; step < kBlocks - 1; ++step)
            store(score(first + query_part(step, late) * kBlock + lane / 8,
                        first + key_part(step, late) * kBlock + lane % kBlock),
                  within_[step]);
        if (half_of(index) == 0) leave_groups<false>(index);
        cta_barrier();
        if (half_of(index) == 1) leave_groups<true>(index);
    }

    // The parts that multiply_parts() has in a step.
    static FA_DEVICE int query_part(int step, bool late) { return step + 1 + (late && step < 2); }
    static FA_DEVICE int key_part(int step, bool late) { return late ? 1 + step / 2 : 0; }

    template <bool kAdds>
    FA_DEVICE void leave_groups(int index) const {
        const int lane = index % 32;
        const bool late = has_late_keys(index);
#pragma unroll
        for (int step = 0; step < kGroups - 1; ++step)
#pragma unroll
            for (int i = 0; i < kKeys; ++i)
#pragma unroll
                for (int j = 0; j < kQueries; ++j) {
                    const int row = query_part(step, late) * kGroup + lane / 8 + j * (kGroup / kQueries);
                    const uint32_t to = score(row, key_part(step, late) * kGroup + lane % 8 + i * (kGroup / kKeys));
                    store(to, between_[step][i][j] + (kAdds ? load(to) : 0.0f));
                }
    }

    FA_DEVICE void write_scores() const {
        for (int i = thread_index(); i < kChunk * (kChunk / 4); i += kThreads) {
            const int row = i / (kChunk / 4), column = i % (kChunk / 4) * 4;
            const Four scores = column <= row ? Four(score(row, column)) : Four{};
            store_global_64(p_.scores + (static_cast<int64_t>(slot_) * kChunk + row) * kChunk + column, packed(scores));
        }
    }

    const ChunkParams& p_;
    const int batch_, head_, first_;  // first token of the chunk, in its row of the batch
    const int rows_;  // tokens from there to the end of the sequence
    const int slot_;
    const uint32_t memory_ = shared_memory();
    float block_[kBlock][kBlock] = {};  // of queries with keys of a block up to theirs
    float within_[kBlocks - 1] = {};  // between blocks of a group
    float between_[kGroups - 1][kKeys][kQueries] = {};  // between groups
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
