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
        : p_(p), sequence_(sequence), head_(head), first_(chunk * kChunk), slot_(slot_of(p, sequence, head) + chunk) {}

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
    static constexpr int kPairs = kBlock * (kBlock + 1) / 2;  // of queries of a block with keys up to theirs
    static constexpr int kBlocks = kGroup / kBlock;
    static constexpr int kHalf = kSlice / 2;
    static constexpr int kQueries = 4;  // of a lane, of a part
    static constexpr int kKeys = kGroup * kGroup / 32 / kQueries;  // of a group, too

    // Asked anew in each loop over a slice: addresses of others would fill registers meanwhile.
    static FA_DEVICE int thread() { return opaque(thread_index()); }

    FA_DEVICE uint32_t query(int row, int column = 0) const { return memory_ + row * kPitch + column * 4; }
    FA_DEVICE uint32_t key(int row, int column = 0) const { return query(row, column) + kRowsBytes; }
    // What all gates of a block make that begins with a row, and later those of a group in the place of its first block.
    FA_DEVICE uint32_t product(int row, int column = 0) const {
        return memory_ + 2 * kRowsBytes + row / kBlock * kPitch + column * 4;
    }

    static FA_DEVICE float load(uint32_t at) { return as_float(load_shared_32(at)); }
    static FA_DEVICE void store(uint32_t at, float x) { store_shared_32(at, as_bits(x)); }
    static FA_DEVICE void scale(uint32_t at, float factor) { store(at, load(at) * factor); }

    // A warp reads a group. A lane has two columns of a block in registers, whose keys meet one query after the other, and
    // before each the gate of that token.
    template <int kFormat>
    FA_DEVICE void multiply_blocks(int first_column) {
        const int lane = thread() % 32, first = thread() / 32 * kGroup, key_head = head_ / p_.group_size;
        const int column = first_column + lane;
        const int64_t token = first_ + first;
        const uint16_t* q = p_.q + column + sequence_.offset(p_.q_stride_batch, p_.q_stride_row, p_.q_stride_head, key_head) +
                            token * p_.q_stride_row;
        const uint16_t* k = p_.k + column + sequence_.offset(p_.k_stride_batch, p_.k_stride_row, p_.k_stride_head, key_head) +
                            token * p_.k_stride_row;
        const int64_t g =
            sequence_.offset(p_.g_stride_batch, p_.g_stride_row, p_.g_stride_head, head_) + token * p_.g_stride_row + column;
        const int rows = sequence_.length - first_ - first, columns = p_.headdim_k - column;
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
            float queries[2][kBlock], keys[2][kBlock], gates[2][kBlock];
#pragma unroll
            for (int i = 0; i < kBlock; ++i) {
                const int row = block * kBlock + i;
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const bool exists = row < rows && half * kHalf < columns;
                    queries[half][i] = exists ? Element::widen(q[row * p_.q_stride_row + half * kHalf]) : 0.0f;
                    keys[half][i] = exists ? Element::widen(k[row * p_.k_stride_row + half * kHalf]) : 0.0f;
                    gates[half][i] = exists ? number_at<kFormat>(p_.g, g + row * p_.g_stride_row + half * kHalf) : 0.0f;
                }
            }
#pragma unroll
            for (int half = 0; half < 2; ++half)
                multiply_block(block, first + block * kBlock, lane + half * kHalf, queries[half], keys[half], gates[half]);
        }
    }

    FA_DEVICE void multiply_block(int block, int first, int column, const float (&queries)[kBlock], float (&keys)[kBlock],
                                  const float (&logs)[kBlock]) {
        float since = 1.0f;
#pragma unroll
        for (int row = 0; row < kBlock; ++row) {
            const float own = queries[row] * p_.scale, gate = exp2_approximate(logs[row] * kLog2E);
#pragma unroll
            for (int i = 0; i < row; ++i) keys[i] *= gate;
#pragma unroll
            for (int i = 0; i <= row; ++i) blocks_[block][row * (row + 1) / 2 + i] += own * keys[i];
            since *= gate;
            store(query(first + row, column), own * since);
        }
#pragma unroll
        for (int row = 0; row < kBlock; ++row) store(key(first + row, column), keys[row]);
        store(product(first, column), since);
    }

    // Queries of kParts parts of rows with keys of parts before theirs, which take the gates of those between on the way. Of
    // four parts, one lane takes the keys of the first part and `late` ones those of the second and third: as many pairs.
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

    // Blocks of the group of a warp. Eight lanes have a quarter of the columns.
    FA_DEVICE void multiply_group() {
        const int lane = thread() % 32, first = thread() / 32 * kGroup;
        multiply_parts<kBlock, kBlocks, 1>(within_, first, lane / kBlock % 2 == 1, lane % kBlock, 0, lane / 8 * (kSlice / 4),
                                           kSlice / 4);
    }

    // Queries by the gates of blocks of their group before theirs, keys by those of blocks behind. A lane has the columns
    // that it had.
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

    // Queries take the gates of groups before theirs on the way, keys those of groups behind.
    FA_DEVICE void write(int first_column) const {
        const int64_t at = slot_ * kChunk * kHeaddim + first_column;
        for (int i = thread(); i < kChunk * (kSlice / 8); i += kThreads) {
            const int row = i / (kSlice / 8), column = i % (kSlice / 8) * 8;
            Four queries[2] = {Four(query(row, column)), Four(query(row, column + 4))};
            Four keys[2] = {Four(key(row, column)), Four(key(row, column + 4))};
            for (int group = 0; group < kGroups; ++group) {
                if (group == row / kGroup) continue;
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    (group < row / kGroup ? queries : keys)[half].multiply(Four(product(group * kGroup, column + half * 4)));
            }
            store_global_128(p_.q_scaled + at + row * kHeaddim + column, packed(queries));
            store_global_128(p_.k_scaled + at + row * kHeaddim + column, packed(keys));
        }
        for (int column = thread(); column < kSlice; column += kThreads) {
            float all = 1.0f;
#pragma unroll
            for (int group = 0; group < kGroups; ++group) all *= load(product(group * kGroup, column));
            p_.factors[slot_ * kHeaddim + first_column + column] = all;
        }
    }

    static FA_DEVICE Words4 packed(const Four (&x)[2]) {
        Words4 words;
#pragma unroll
        for (int i = 0; i < 4; ++i) words.word[i] = Element::pack(x[i / 2].x[i % 2 * 2], x[i / 2].x[i % 2 * 2 + 1]);
        return words;
    }

    FA_DEVICE uint32_t score(int row, int column) const { return memory_ + row * kScorePitch + column * 4; }

    FA_DEVICE void leave_scores() {
        const int index = thread_index(), lane = index % 32, first = index / 32 * kGroup;
        leave_blocks(lane, first);
        const bool late = lane / kBlock % 2 == 1;
#pragma unroll
        for (int step = 0; step < kBlocks - 1; ++step)
#pragma unroll
            for (int j = 0; j < kQueries; ++j) {
                float sum = within_[step][0][j];
                sum += shuffle_xor(sum, 8);
                sum += shuffle_xor(sum, 16);
                if (lane < 8)
                    store(
                        score(first + query_part(step, late) * kBlock + j, first + key_part(step, late) * kBlock + lane % 4),
                        sum);
            }
        if (half_of(index) == 0) leave_groups<false>(index);
        cta_barrier();
        if (half_of(index) == 1) leave_groups<true>(index);
    }

    // The parts that multiply_parts() has in a step.
    static FA_DEVICE int query_part(int step, bool late) { return step + 1 + (late && step < 2); }
    static FA_DEVICE int key_part(int step, bool late) { return late ? 1 + step / 2 : 0; }

    // Sums over the lanes of a warp. Of pairs of lanes each takes over half of the blocks, until a lane has one.
    FA_DEVICE void leave_blocks(int lane, int first) const {
        const bool upper = lane & 16, odd = lane & 8;
        int at = 0;
#pragma unroll
        for (int row = 0; row < kBlock; ++row)
#pragma unroll
            for (int column = 0; column <= row; ++column, ++at) {
                float half[2];
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const float low = blocks_[i][at], high = blocks_[2 + i][at];
                    half[i] = (upper ? high : low) + shuffle_xor(upper ? low : high, 16);
                }
                float sum = (odd ? half[1] : half[0]) + shuffle_xor(odd ? half[0] : half[1], 8);
#pragma unroll
                for (int mask = 4; mask > 0; mask /= 2) sum += shuffle_xor(sum, mask);
                const int begin = first + lane / 8 * kBlock;
                if (lane % 8 == 0) store(score(begin + row, begin + column), sum);
            }
    }

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
        for (int i = thread_index(); i < kChunk * (kChunk / 8); i += kThreads) {
            const int row = i / (kChunk / 8), column = i % (kChunk / 8) * 8;
            Four scores[2];
#pragma unroll
            for (int j = 0; j < 8; ++j) scores[j / 4].x[j % 4] = column + j <= row ? load(score(row, column + j)) : 0.0f;
            store_global_128(p_.scores + (slot_ * kChunk + row) * kChunk + column, packed(scores));
        }
    }

    const ChunkParams& p_;
    const Sequence sequence_;
    const int head_, first_;  // first token, of the sequence
    const int64_t slot_;
    const uint32_t memory_ = shared_memory();
    float blocks_[kBlocks][kPairs] = {};  // of a group, in one or two columns of a slice
    float within_[kBlocks - 1][1][kQueries] = {};  // between blocks of a group
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
