// Splits linear attention into tasks of the thread pool, by sequences, heads and columns of values.
#include <algorithm>
#include <exception>
#include <vector>

#include "common/arena.hpp"
#include "common/divide_up.hpp"
#include "common/thread_pool.hpp"
#include "linear/driver.hpp"

namespace fastattention {
namespace {

// The columns of a task are a multiple of this. With fewer columns, more tasks would repeat the scores of a chunk. With
// more, the state would not fit the L1 cache when computing token by token.
constexpr int64_t kColumns = 64;
constexpr int64_t kTasksOfThread = 2;
// Up to this many tokens, reading and writing the state dominates. Threads then share no head if there are enough heads, as
// each would fetch cache lines that the other is about to write.
constexpr int64_t kFewTokens = 4;
// Multiply-adds below which waking another thread costs more than it saves.
constexpr double kSerialWork = 2e5;
constexpr int64_t kCacheLineFloats = 16;

// The heads of a task of chunks take turns. Their states, in floats, must fit an L2 cache beside the buffers of a chunk.
constexpr int64_t kMostStateFloats = int64_t{1} << 17;

int64_t heads_of_task(const FaLinearParams& p) {
    if (p.chunk == 0) return 1;
    const int64_t heads = p.num_sequences * p.nheads / (kTasksOfThread * p.num_threads);
    return std::clamp(std::min(heads, kMostStateFloats / (p.headdim_k * p.headdim_v)), int64_t{1}, p.nheads);
}

int64_t columns_of_task(const FaLinearParams& p) {
    const int64_t heads = std::max<int64_t>(p.num_sequences * p.nheads, 1);
    const int64_t tokens = p.cu_seqlens ? p.seqlen / std::max<int64_t>(p.num_sequences, 1) : p.seqlen;
    if (p.chunk == 0 && tokens > kFewTokens) return kColumns;
    const int64_t slices = divide_up((p.chunk == 0 ? 1 : kTasksOfThread) * p.num_threads, heads);
    return divide_up(divide_up(p.headdim_v, slices), kColumns) * kColumns;
}

// A task with the tokens of a sequence.
LinearTask task_of_sequence(const FaLinearParams& p, int64_t sequence) {
    LinearTask task{sequence, 0, 0, p.cu_seqlens ? 0 : sequence, 0, p.seqlen, 0, p.headdim_v};
    if (p.cu_seqlens) {
        task.first_token = p.cu_seqlens[sequence];
        task.num_tokens = p.cu_seqlens[sequence + 1] - task.first_token;
    }
    return task;
}

std::vector<LinearTask> tasks_of(const FaLinearParams& p) {
    const int64_t columns = columns_of_task(p), heads = heads_of_task(p);
    std::vector<LinearTask> tasks;
    for (int64_t sequence = 0; sequence < p.num_sequences; ++sequence) {
        LinearTask task = task_of_sequence(p, sequence);
        for (task.head = 0; task.head < p.nheads; task.head += heads) {
            task.num_heads = std::min(heads, p.nheads - task.head);
            for (task.first_column = 0; task.first_column < p.headdim_v; task.first_column += columns) {
                task.num_columns = std::min(columns, p.headdim_v - task.first_column);
                tasks.push_back(task);
            }
        }
    }
    // The longest tasks come first, so that threads finish together.
    std::stable_sort(tasks.begin(), tasks.end(),
                     [](const LinearTask& a, const LinearTask& b) { return a.num_tokens > b.num_tokens; });
    return tasks;
}

}  // namespace

bool linear(const LinearKernels& kernels, const FaLinearParams& p) {
    try {
        const std::vector<LinearTask> tasks = tasks_of(p);
        double work = 0.0;
        for (const LinearTask& task : tasks)
            work += static_cast<double>(task.num_heads) * task.num_tokens * task.num_columns * p.headdim_k;
        const int threads = work < kSerialWork ? 1 : static_cast<int>(p.num_threads);
        const int64_t columns = std::min(columns_of_task(p), p.headdim_v);
        const int64_t scratch = divide_up(kernels.scratch(p, columns, heads_of_task(p)), kCacheLineFloats) * kCacheLineFloats;
        Arena arena(scratch * threads * sizeof(float));
        if (arena.data() == nullptr) return false;
        float* working = reinterpret_cast<float*>(arena.data());
        parallel_for(static_cast<int64_t>(tasks.size()), threads,
                     [&](int64_t index, int slot) { kernels.run(p, tasks[index], working + slot * scratch); });
        return true;
    } catch (const std::exception&) {  // no memory for the list; tasks throw nothing
        return false;
    }
}

bool linear_backward(const LinearKernels& kernels, const FaLinearParams& p, const FaLinearGradients& gradients) {
    try {
        struct PartOfHeads {
            LinearTask task;
            int64_t part;
        };
        std::vector<PartOfHeads> tasks;
        const int64_t group = p.nheads / p.nheads_k, heads = divide_up(group, gradients.num_parts);
        int64_t longest = 0;
        double work = 0.0;
        for (int64_t sequence = 0; sequence < p.num_sequences; ++sequence) {
            LinearTask task = task_of_sequence(p, sequence);
            longest = std::max(longest, task.num_tokens);
            work += static_cast<double>(task.num_tokens) * p.nheads * p.headdim_k * p.headdim_v;
            for (int64_t first = 0; first < p.nheads; first += group)
                for (int64_t part = 0; part < gradients.num_parts; ++part) {
                    task.head = first + std::min(part * heads, group);
                    task.num_heads = std::min(heads, first + group - task.head);
                    tasks.push_back({task, part});
                }
        }
        std::stable_sort(tasks.begin(), tasks.end(),
                         [](const PartOfHeads& a, const PartOfHeads& b) { return a.task.num_tokens > b.task.num_tokens; });
        const int64_t num_tasks = static_cast<int64_t>(tasks.size());
        const int threads = work < kSerialWork ? 1 : static_cast<int>(std::min(p.num_threads, num_tasks));
        const int64_t scratch = divide_up(kernels.backward_scratch(p, longest), kCacheLineFloats) * kCacheLineFloats;
        Arena arena(scratch * threads * sizeof(float));
        if (arena.data() == nullptr) return false;
        float* working = reinterpret_cast<float*>(arena.data());
        parallel_for(num_tasks, threads, [&](int64_t index, int slot) {
            kernels.backward(p, gradients, tasks[index].task, tasks[index].part, working + slot * scratch);
        });
        return true;
    } catch (const std::exception&) {  // no memory for the list; tasks throw nothing
        return false;
    }
}

}  // namespace fastattention
