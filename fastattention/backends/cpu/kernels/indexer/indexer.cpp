// Splits a call of the indexer into tasks: scores of some queries, in memory of a bounded size, and then their best keys.
#include <algorithm>
#include <cstring>
#include <exception>
#include <vector>

#include "common/arena.hpp"
#include "common/divide_up.hpp"
#include "common/thread_pool.hpp"
#include "indexer/driver.hpp"
#include "indexer/top_keys.hpp"

namespace fastattention {
namespace {

constexpr int64_t kScoreFloats = 1 << 24;  // in memory at a time, unless one query has more keys
constexpr int64_t kTaskKeys = 2048, kKeyStep = 64;
constexpr int64_t kTasksOfThread = 4;
// Multiply-adds below which waking another thread costs more than it saves.
constexpr double kSerialWork = 1e6;

// Rows of q of one sequence, and how many of its keys the last of them sees.
struct Queries {
    int64_t sequence, first_row, end_row, seen;
};

class Indexer {
public:
    Indexer(const IndexerKernels& kernels, const FaIndexerParams& p) : kernels_(kernels), p_(p) {
        for (int64_t sequence = 0; sequence < p.batch_size; ++sequence)
            most_keys_ = std::max(most_keys_, length_of(sequence));
        stride_ = divide_up(std::max<int64_t>(most_keys_, 1), kKeyStep) * kKeyStep;
        const double keys = static_cast<double>(p.total_q) * static_cast<double>(most_keys_);
        const double work = keys * static_cast<double>(p.nheads * p.headdim);
        num_threads_ = work < kSerialWork ? 1 : static_cast<int>(p.num_threads);
        scratch_ = kernels.scratch_floats(p);
    }

    bool run() const {
        const int64_t rows = std::min(p_.total_q, std::max<int64_t>(kScoreFloats / stride_, kIndexerRows));
        Arena arena((rows * stride_ + num_threads_ * scratch_) * sizeof(float));
        if (arena.data() == nullptr) return false;
        float* const scores = reinterpret_cast<float*>(arena.data());
        for (int64_t first = 0; first < p_.total_q; first += rows)
            run_rows(first, std::min(first + rows, p_.total_q), scores, scores + rows * stride_);
        return true;
    }

private:
    // The first row of a sequence.
    int64_t row_of(int64_t sequence) const { return p_.cu_seqlens_q ? p_.cu_seqlens_q[sequence] : sequence * p_.seqlen_q; }

    int64_t length_of(int64_t sequence) const {
        if (p_.seqused_k) return p_.seqused_k[sequence];
        return p_.cu_seqlens_k ? p_.cu_seqlens_k[sequence + 1] - p_.cu_seqlens_k[sequence] : p_.k_seqlen;
    }

    // How many keys a row of q sees.
    int64_t seen_by(int64_t sequence, int64_t row) const {
        const int64_t behind = p_.causal ? row_of(sequence + 1) - 1 - row : 0;
        return std::max<int64_t>(length_of(sequence) - behind, 0);
    }

    void run_rows(int64_t first, int64_t end, float* scores, float* scratch) const {
        const std::vector<Queries> blocks = blocks_of(first, end);
        std::vector<IndexerTask> tasks;
        const int64_t step = key_step(blocks);
        for (const Queries& block : blocks) {
            // Where there are no more keys than a query gets, nothing needs a score.
            if (block.seen <= p_.topk) continue;
            for (int64_t key = 0; key < block.seen; key += step)
                tasks.push_back({block.sequence, block.first_row, block.end_row - block.first_row, key,
                                 std::min(key + step, block.seen), scores + (block.first_row - first) * stride_, stride_});
        }
        parallel_for(static_cast<int64_t>(tasks.size()), num_threads_,
                     [&](int64_t index, int slot) { kernels_.score(p_, tasks[index], scratch + slot * scratch_); });
        parallel_for(static_cast<int64_t>(blocks.size()), num_threads_, [&](int64_t index, int) {
            const Queries& block = blocks[index];
            for (int64_t row = block.first_row; row < block.end_row; ++row)
                write_top_keys(scores + (row - first) * stride_, seen_by(block.sequence, row), p_.topk,
                               p_.indices + row * p_.topk);
        });
    }

    std::vector<Queries> blocks_of(int64_t first, int64_t end) const {
        std::vector<Queries> blocks;
        for (int64_t sequence = 0; sequence < p_.batch_size; ++sequence) {
            const int64_t last = std::min(row_of(sequence + 1), end);
            for (int64_t row = std::max(row_of(sequence), first); row < last; row += kIndexerRows) {
                const int64_t end_row = std::min(row + kIndexerRows, last);
                blocks.push_back({sequence, row, end_row, seen_by(sequence, end_row - 1)});
            }
        }
        return blocks;
    }

    // Keys of a task: fewer where otherwise threads would have too few tasks.
    int64_t key_step(const std::vector<Queries>& blocks) const {
        int64_t keys = 0;
        for (const Queries& block : blocks) keys += block.seen;
        const int64_t step = divide_up(keys, kTasksOfThread * num_threads_ * kKeyStep) * kKeyStep;
        return std::clamp(step, kKeyStep, kTaskKeys);
    }

    const IndexerKernels& kernels_;
    const FaIndexerParams& p_;
    int64_t most_keys_ = 0, stride_, scratch_;
    int num_threads_;
};

}  // namespace

bool index_keys(const IndexerKernels& kernels, const FaIndexerParams& params) {
    try {
        return Indexer(kernels, params).run();
    } catch (const std::exception&) {  // no memory for the lists; tasks throw nothing
        return false;
    }
}

}  // namespace fastattention
