// Splits a causal convolution into tasks of the thread pool, by sequences, ranges of tokens, and channels.
#include <algorithm>
#include <exception>
#include <vector>

#include "common/arena.hpp"
#include "common/divide_up.hpp"
#include "common/thread_pool.hpp"
#include "convolution/driver.hpp"

namespace fastattention {
namespace {

// Tokens of a task. It does not depend on the number of threads, because a backward adds up the sums of each range: results
// have the same bits for any number.
constexpr int64_t kRangeTokens = 256;
// Multiply-adds below which waking another thread costs more than it saves.
constexpr double kSerialWork = 2e5;

struct Plan {
    std::vector<ConvolutionTask> tasks;
    std::vector<int64_t> ranges;  // index of each task's range of tokens, among those of all sequences
    int64_t num_ranges = 0;
    int num_threads = 1;
};

Plan plan_of(const FaConvolutionParams& p, double work_of_element) {
    Plan plan;
    double tokens = 0.0;
    for (int64_t sequence = 0; sequence < p.num_sequences; ++sequence) {
        ConvolutionTask task{sequence, p.cu_seqlens ? 0 : sequence, 0, p.seqlen, 0, 0, 0, 0};
        if (p.cu_seqlens) {
            task.first_token = p.cu_seqlens[sequence];
            task.num_tokens = p.cu_seqlens[sequence + 1] - task.first_token;
        }
        tokens += static_cast<double>(task.num_tokens);
        // An update reads a state before it writes it, so one task has all tokens. A sequence without tokens has states.
        const int64_t step = p.updates ? std::max<int64_t>(task.num_tokens, 1) : kRangeTokens;
        do {
            task.end = std::min(task.begin + step, task.num_tokens);
            for (task.first_channel = 0; task.first_channel < p.channels; task.first_channel += kConvolutionChannels) {
                task.num_channels = std::min(kConvolutionChannels, p.channels - task.first_channel);
                plan.tasks.push_back(task);
                plan.ranges.push_back(plan.num_ranges);
            }
            ++plan.num_ranges;
            task.begin = task.end;
        } while (task.begin < task.num_tokens);
    }
    const double work = tokens * static_cast<double>(p.channels * p.width) * work_of_element;
    plan.num_threads = work < kSerialWork ? 1 : static_cast<int>(p.num_threads);
    return plan;
}

}  // namespace

bool convolution(const ConvolutionKernels& kernels, const FaConvolutionParams& p) {
    try {
        const Plan plan = plan_of(p, 1.0);
        Arena arena(kConvolutionScratch * plan.num_threads * sizeof(float));
        if (arena.data() == nullptr) return false;
        float* working = reinterpret_cast<float*>(arena.data());
        parallel_for(static_cast<int64_t>(plan.tasks.size()), plan.num_threads, [&](int64_t index, int slot) {
            kernels.run(p, plan.tasks[index], working + slot * kConvolutionScratch);
        });
        return true;
    } catch (const std::exception&) {  // no memory for the list; tasks throw nothing
        return false;
    }
}

bool convolution_backward(const ConvolutionKernels& kernels, const FaConvolutionParams& p,
                          const FaConvolutionGradients& gradients) {
    try {
        const Plan plan = plan_of(p, 3.0);  // the convolution again, and two products of its size
        const int64_t sums_of_range = (p.width + 1) * p.channels;
        Arena arena((kConvolutionScratch * plan.num_threads + sums_of_range * plan.num_ranges) * sizeof(float));
        if (arena.data() == nullptr) return false;
        float* const working = reinterpret_cast<float*>(arena.data());
        float* const sums = working + kConvolutionScratch * plan.num_threads;
        parallel_for(static_cast<int64_t>(plan.tasks.size()), plan.num_threads, [&](int64_t index, int slot) {
            kernels.differentiate(p, gradients, plan.tasks[index], sums + plan.ranges[index] * sums_of_range,
                                  working + slot * kConvolutionScratch);
        });
        if (gradients.grad_weight == nullptr && gradients.grad_bias == nullptr) return true;
        parallel_for(divide_up(p.channels, kConvolutionChannels), plan.num_threads, [&](int64_t index, int slot) {
            const int64_t first = index * kConvolutionChannels;
            kernels.write_parameter_gradients(p, gradients, sums, plan.num_ranges, first,
                                              std::min(kConvolutionChannels, p.channels - first),
                                              working + slot * kConvolutionScratch);
        });
        return true;
    } catch (const std::exception&) {
        return false;
    }
}

}  // namespace fastattention
