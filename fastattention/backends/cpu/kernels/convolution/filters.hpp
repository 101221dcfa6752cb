// What both passes of the causal convolution share: filters and states of the channels of a task, rows of tokens, and SiLU.
// fastattention/convolution/reference.py has the formulas.
#pragma once

namespace FA_NAMESPACE {

// 1 / (1 + exp(-x)); 0 below -87, where it is less than the smallest normal number. Not nearly 0: x times it would be large
// for a large x. The bound keeps 2^y finite.
FA_INLINE Vec sigmoid(Vec x) {
    const Vec exponent = minimum(broadcast(126.0f), x * broadcast(-kLog2E));  // in this order a NaN is kept
    return select_less(x, broadcast(-87.0f), zero(), broadcast(1.0f) / (broadcast(1.0f) + exp2(exponent)));
}

// The channels of a task.
template <class ElementType, int kFilterWidth>
struct ConvolutionChannels {
    using Element = ElementType;
    static constexpr int kWidth = kFilterWidth;
    static constexpr int kBefore = kWidth - 1;  // tokens before the first one that it needs
    // Tokens of a block. Rows of a block are read side by side, a vector of each at a time: one token after the other would
    // read the rows before it again, and one channel after the other would touch a page for each token.
    static constexpr int kBlockTokens = 8;

    const FaConvolutionParams& p;
    const ConvolutionTask& task;
    const int64_t stride = round_up(task.num_channels, Vec::kWidth);  // floats between rows of working memory
    float* const weights;  // (kWidth, stride)
    float* const bias = weights + kWidth * stride;
    float* const before = bias + stride;  // (kBefore, stride): inputs before the sequence
    float* const free = before + kBefore * stride;  // working memory that is left, of kWidth rows at least

    ConvolutionChannels(const FaConvolutionParams& params, const ConvolutionTask& of, float* scratch)
        : p(params), task(of), weights(scratch) {
        const int64_t count = task.num_channels * kWidth;
        widen_any(p.weight, p.weight_dtype, task.first_channel * kWidth, free, count, count);
        memset(weights, 0, (kWidth + 1 + kBefore) * stride * sizeof(float));
        for (int64_t c = 0; c < task.num_channels; ++c)
            for (int w = 0; w < kWidth; ++w) weights[w * stride + c] = free[c * kWidth + w];
        if (p.bias != nullptr) widen_any(p.bias, p.bias_dtype, task.first_channel, bias, task.num_channels, stride);
        if (task.begin == 0 && p.initial_state != nullptr) {
            if (p.state_dtype == FA_FLOAT32) {
                read_before(static_cast<const float*>(p.initial_state));
            } else {
                read_before(static_cast<const Element*>(p.initial_state));
            }
        }
    }

    // The row of a token of the sequence, from the first channel of the task on.
    const Element* x(int64_t token) const {
        return static_cast<const Element*>(p.x) + task.batch * p.x_stride_batch +
               (task.first_token + token) * p.x_stride_row + task.first_channel;
    }
    // The same of a contiguous tensor shaped like x.
    int64_t row(int64_t token) const {
        return (task.batch * p.seqlen + task.first_token + token) * p.channels + task.first_channel;
    }

    // Calls visit(first channel, vector) for all channels of the task.
    template <class Visit>
    __attribute__((always_inline)) void for_each_vector(Visit visit) const {
        int64_t c = 0;
        for (; c + Vec::kWidth <= task.num_channels; c += Vec::kWidth) visit(c, WholeVector{});
        if (c < task.num_channels) visit(c, PartOfVector{static_cast<int>(task.num_channels - c)});
    }

    // The inputs before a token that is the first of a block, from channel c on: from x, or from before the sequence.
    template <class Vector>
    __attribute__((always_inline)) void read_window(Vec (&window)[kWidth], int64_t token, int64_t c, Vector vector) const {
        if (token == 0) {
            for (int w = 0; w < kBefore; ++w) window[w] = load(before + w * stride + c);
        } else {
            for (int w = 0; w < kBefore; ++w) window[w] = vector.load(x(token - kBefore + w) + c);
        }
    }

private:
    template <class State>
    void read_before(const State* state) {
        State* const row = reinterpret_cast<State*>(free);
        for (int w = 0; w < kBefore; ++w) {
            const State* const from = state + task.sequence * p.initial_stride_sequence +
                                      task.first_channel * p.initial_stride_channel +
                                      (p.state_len - kBefore + w) * p.initial_stride_input;
            for (int64_t c = 0; c < task.num_channels; ++c) row[c] = from[c * p.initial_stride_channel];
            widen_row(row, before + w * stride, task.num_channels, stride);
        }
    }
};

}  // namespace FA_NAMESPACE
