// Runs a backward: packs heads in waves, and hands their chunks of keys to threads (backward.hpp).
#include <algorithm>
#include <exception>
#include <vector>

#include "common/arena.hpp"
#include "common/divide_up.hpp"
#include "common/fresh_pages.hpp"
#include "attention/driver.hpp"
#include "attention/sequences.hpp"
#include "common/thread_pool.hpp"

namespace fastattention {
namespace {

// Heads are packed and processed in waves of about this many bytes, so that working memory does not grow with the batch. A
// wave is small enough for the arena to keep, and for caches. It has enough heads for threads to alternate between.
constexpr int64_t kWaveBytes = int64_t{16} << 20, kWaveBytesOfThread = int64_t{2} << 20;
// Less work than this stays on one thread. It is less than in forward.cpp, as a backward has five products, a forward two.
constexpr double kSerialWork = 2e5;
constexpr int64_t kCacheLineFloats = 16;

class Backward {
public:
    Backward(const AttentionKernels& kernels, const FaAttentionParams& p, const FaGradients& gradients)
        : kernels_(kernels), p_(p), gradients_(gradients), geometry_(kernels.backward_geometry(p)) {
        call_ = make_call(p);
        double work = 0.0;
        for (int64_t b = 0; b < p.batch_size; ++b) {
            sequences_.push_back(make_sequence(call_, b));
            const TileRange& mask = sequences_.back().mask;
            const double pairs = static_cast<double>(mask.seqlen_q) * visible_keys(mask).size();
            work += pairs * p.nheads * (p.headdim + p.headdim_v);
        }
        call_.sequences = sequences_.data();
        num_threads_ = work < kSerialWork ? 1 : static_cast<int>(p.num_threads);
    }

    bool run() {
        if (gradients_.grad_sinks) std::fill_n(gradients_.grad_sinks, p_.nheads, 0.0f);
        std::vector<Job> jobs;
        int64_t first_query = 0, first_key = 0;
        for (int64_t i = 0; i < p_.batch_size; ++i) {
            const TileRange& mask = sequences_[i].mask;
            const int64_t tiles = call_.num_tiles(sequences_[i], geometry_.tile_rows);
            const int64_t chunks = divide_up(mask.seqlen_k, geometry_.keys);
            for (int64_t head = 0; head < p_.nheads_k && tiles + chunks > 0; ++head)
                jobs.push_back({{i, head, first_query, first_key, nullptr, nullptr, nullptr, nullptr}, tiles, chunks});
            first_query += mask.seqlen_q;
            first_key += mask.seqlen_k;
        }
        const int64_t query_bytes = first_query * p_.nheads * call_.element_size;
        const int64_t key_bytes = first_key * p_.nheads_k * call_.element_size;
        if (gradients_.grad_q) provide_pages(gradients_.grad_q, query_bytes * p_.headdim, num_threads_);
        if (gradients_.grad_k) provide_pages(gradients_.grad_k, key_bytes * p_.headdim, num_threads_);
        if (gradients_.grad_v) provide_pages(gradients_.grad_v, key_bytes * p_.headdim_v, num_threads_);
        const int64_t most_bytes = std::max(kWaveBytes, kWaveBytesOfThread * num_threads_);
        for (size_t begin = 0, end; begin < jobs.size(); begin = end) {
            int64_t floats = floats_of(jobs[begin]);
            for (end = begin + 1; end < jobs.size() && (floats + floats_of(jobs[end])) * 4 <= most_bytes; ++end)
                floats += floats_of(jobs[end]);
            if (!run_wave(&jobs[begin], static_cast<int64_t>(end - begin), floats)) return false;
        }
        return true;
    }

private:
    struct Job {
        BackwardHead head;
        int64_t tiles, chunks;
    };

    // The floats that a head's tiles take: packed rows, gradients of q, sums for sinks, and turns.
    int64_t floats_of(const Job& job) const {
        const int64_t tile = geometry_.tile_floats + geometry_.grad_q_floats + call_.group_size + 1;
        return divide_up(job.tiles * tile, kCacheLineFloats) * kCacheLineFloats;
    }

    void place(Job& job, float* memory) const {
        job.head.tiles = memory;
        job.head.grad_q = job.head.tiles + job.tiles * geometry_.tile_floats;
        float* sums = job.head.grad_q + job.tiles * geometry_.grad_q_floats;
        job.head.grad_sinks = gradients_.grad_sinks ? sums : nullptr;
        job.head.turn = reinterpret_cast<int32_t*>(sums + job.tiles * call_.group_size);
        std::fill_n(job.head.turn, job.tiles, -1);  // until the first chunk sets the turn
    }

    bool run_wave(Job* jobs, int64_t count, int64_t floats) {
        const int64_t scratch = divide_up(geometry_.scratch_floats, kCacheLineFloats) * kCacheLineFloats;
        Arena arena((scratch * num_threads_ + floats) * sizeof(float));
        if (arena.data() == nullptr) return false;
        float* working = reinterpret_cast<float*>(arena.data());
        float* memory = working + scratch * num_threads_;
        struct Part {
            int64_t job, index;
        };
        std::vector<Part> tiles, chunks;
        int64_t most_chunks = 0;
        for (int64_t i = 0; i < count; ++i) {
            place(jobs[i], memory);
            memory += floats_of(jobs[i]);
            for (int64_t tile = 0; tile < jobs[i].tiles; ++tile) tiles.push_back({i, tile});
            most_chunks = std::max(most_chunks, jobs[i].chunks);
        }
        // Chunks of one head wait for each other, so chunks of other heads go between them. The first chunks of a causal
        // head have the most queries and start first, so that threads finish together.
        for (int64_t chunk = 0; chunk < most_chunks; ++chunk)
            for (int64_t i = 0; i < count; ++i)
                if (chunk < jobs[i].chunks) chunks.push_back({i, chunk});
        parallel_for(static_cast<int64_t>(tiles.size()), num_threads_, [&](int64_t index, int) {
            kernels_.pack_rows(call_, gradients_, jobs[tiles[index].job].head, tiles[index].index);
        });
        parallel_for(static_cast<int64_t>(chunks.size()), num_threads_, [&](int64_t index, int slot) {
            const Job& job = jobs[chunks[index].job];
            kernels_.backward_chunk(call_, gradients_, job.head, chunks[index].index, working + slot * scratch);
        });
        for (int64_t i = 0; i < count && gradients_.grad_sinks; ++i)
            for (int64_t j = 0; j < jobs[i].tiles * call_.group_size; ++j)
                gradients_.grad_sinks[jobs[i].head.kv_head * call_.group_size + j % call_.group_size] +=
                    jobs[i].head.grad_sinks[j];
        return true;
    }

    const AttentionKernels& kernels_;
    const FaAttentionParams& p_;
    const FaGradients& gradients_;
    const BackwardGeometry geometry_;
    Call call_;
    std::vector<Sequence> sequences_;
    int num_threads_ = 1;
};

}  // namespace

bool backward(const AttentionKernels& kernels, const FaAttentionParams& params, const FaGradients& gradients) {
    try {
        return Backward(kernels, params, gradients).run();
    } catch (const std::exception&) {  // no memory for lists; tasks throw nothing
        return false;
    }
}

}  // namespace fastattention
