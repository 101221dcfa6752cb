// Turns indices into slots, some sets of indices at a time.
#include <algorithm>
#include <atomic>
#include <limits>

#include "common/divide_up.hpp"
#include "common/dtype.h"
#include "common/thread_pool.hpp"
#include "selection/driver.hpp"

namespace fastattention {
namespace {

// Slots of a task: fewer take less time than waking another thread.
constexpr int64_t kTaskSlots = 1 << 14;
constexpr int64_t kNone = std::numeric_limits<int64_t>::max();

// The keys that a query may name.
struct Sequence {
    int64_t index, length;
    int64_t seen;  // how many keys of the sequence the query sees; they are the first ones
};

template <class Index>
class Selection {
public:
    explicit Selection(const FaSelectionParams& p) : p_(p), width_(p.topk * p.key_block) {}

    int64_t run() {
        const int64_t sets = p_.total_q * p_.heads, step = std::max<int64_t>(kTaskSlots / std::max<int64_t>(width_, 1), 1);
        parallel_for(divide_up(sets, step), static_cast<int>(p_.num_threads), [&](int64_t task, int) {
            for (int64_t set = task * step; set < std::min((task + 1) * step, sets); ++set) select(set);
        });
        const int64_t wrong = wrong_.load(std::memory_order_relaxed);
        return wrong == kNone ? -1 : wrong;
    }

private:
    void select(int64_t set) {
        const Sequence sequence = sequence_of(set / p_.heads);
        const Index* const indices = static_cast<const Index*>(p_.indices) + set * p_.topk;
        const int64_t of_head = set % p_.heads * p_.head_step, blocks = divide_up(sequence.length, p_.key_block);
        int32_t* const slots = p_.slots + set * width_;
        int64_t count = 0;
        for (int64_t column = 0; column < p_.topk; ++column) {
            const int64_t block = indices[column];
            if (block < -1 || block >= blocks) return note(set * p_.topk + column);
            if (block < 0) continue;
            const int64_t end = std::min((block + 1) * p_.key_block, sequence.seen);
            for (int64_t key = block * p_.key_block; key < end; ++key)
                slots[count++] = static_cast<int32_t>(token_of(sequence.index, key) * p_.token_step + of_head);
        }
        std::fill(slots + count, slots + width_, 0);
        p_.counts[set] = static_cast<int32_t>(count);
    }

    Sequence sequence_of(int64_t query) const {
        int64_t index, end;
        if (p_.cu_seqlens_q == nullptr) {
            index = query / p_.seqlen_q;
            end = (index + 1) * p_.seqlen_q;
        } else {
            const int32_t* const ends = p_.cu_seqlens_q + 1;
            index = std::upper_bound(ends, ends + p_.batch_size, static_cast<int32_t>(query)) - ends;
            end = ends[index];
        }
        int64_t length = p_.k_seqlen;
        if (p_.seqused_k) length = p_.seqused_k[index];
        else if (p_.cu_seqlens_k) length = p_.cu_seqlens_k[index + 1] - p_.cu_seqlens_k[index];
        return {index, length, p_.causal ? length - (end - 1 - query) : length};
    }

    int64_t token_of(int64_t sequence, int64_t key) const {
        if (p_.block_table) {
            const uint32_t at = static_cast<uint32_t>(key), size = static_cast<uint32_t>(p_.k_seqlen);
            return p_.block_table[sequence * p_.block_table_stride + at / size] * p_.row_step + at % size;
        }
        return (p_.cu_seqlens_k ? p_.cu_seqlens_k[sequence] : sequence * p_.row_step) + key;
    }

    // Keeps the first place.
    void note(int64_t place) {
        int64_t known = wrong_.load(std::memory_order_relaxed);
        while (place < known && !wrong_.compare_exchange_weak(known, place, std::memory_order_relaxed)) {}
    }

    const FaSelectionParams& p_;
    const int64_t width_;
    std::atomic<int64_t> wrong_{kNone};
};

}  // namespace

int64_t select_slots(const FaSelectionParams& params) {
    return params.dtype == FA_INT64 ? Selection<int64_t>(params).run() : Selection<int32_t>(params).run();
}

}  // namespace fastattention
