// Gradients of the causal convolution. With g[t] the gradient of what the filter gives for token t, before SiLU:
//
//     grad_x[s]      = sum_w weight[w] g[s + width - 1 - w], over tokens of the sequence, + its part of grad_final_state
//     grad_weight[w] = sum_t g[t] x[t - width + 1 + w]
//     grad_bias      = sum_t g[t]
//
// Tokens before the sequence stand in its state. A task goes on for width - 1 tokens after its own, which only gradients of
// its last tokens need; their sums belong to the next task.
#pragma once

namespace FA_NAMESPACE {

template <class Element, int kWidth>
class ConvolutionBackward {
    using Channels = ConvolutionChannels<Element, kWidth>;
    static constexpr int kBefore = Channels::kBefore;

public:
    ConvolutionBackward(const FaConvolutionParams& p, const FaConvolutionGradients& gradients, const ConvolutionTask& task,
                        float* sums, float* scratch)
        : p_(p),
          gradients_(gradients),
          task_(task),
          channels_(p, task, scratch),
          sums_(sums + task.first_channel),
          newest_(channels_.free),
          of_final_state_(newest_ + kBefore * channels_.stride),
          of_initial_state_(of_final_state_ + kBefore * channels_.stride) {}

    void run() const {
        for (int w = 0; w <= kWidth; ++w) memset(sums_ + w * p_.channels, 0, task_.num_channels * sizeof(float));
        memset(newest_, 0, 3 * kBefore * channels_.stride * sizeof(float));
        if (gradients_.grad_final_state != nullptr) read_gradients_of_state();
        const int64_t end = task_.end + kBefore;
        for (int64_t token = task_.begin; token < end; token += Channels::kBlockTokens)
            block(token, static_cast<int>(smaller(Channels::kBlockTokens, end - token)));
        if (task_.begin == 0 && gradients_.grad_initial_state != nullptr) write_gradients_of_state();
    }

private:
    // `token` may be up to width - 2 after the last one of the sequence.
    void block(int64_t token, int count) const {
        channels_.for_each_vector([&](int64_t c, auto vector) __attribute__((always_inline)) {
            Vec window[kWidth] = {}, weights[kWidth], grads[kWidth], sums[kWidth + 1];
            // Where the block begins after the sequence, no token reads the window.
            if (token < task_.num_tokens) channels_.read_window(window, token, c, vector);
            for (int w = 0; w < kWidth; ++w) weights[w] = load(channels_.weights + w * channels_.stride + c);
            for (int w = 0; w < kBefore; ++w) grads[w] = load(newest_ + w * channels_.stride + c);
            for (int w = 0; w <= kWidth; ++w) sums[w] = vector.load(sums_ + w * p_.channels + c);
            const Vec bias = load(channels_.bias + c);
            for (int i = 0; i < count; ++i) {
                grads[kBefore] = zero();
                if (token + i < task_.num_tokens) {
                    window[kBefore] = vector.load(channels_.x(token + i) + c);
                    grads[kBefore] = gradient(token + i, c, vector, window, weights, bias);
                    if (token + i < task_.end) {
                        for (int w = 0; w < kWidth; ++w) sums[w] = fma(grads[kBefore], window[w], sums[w]);
                        sums[kWidth] = sums[kWidth] + grads[kBefore];
                    }
                    for (int w = 0; w < kBefore; ++w) window[w] = window[w + 1];
                }
                write_gradient(token + i - kBefore, c, vector, grads, weights);
                for (int w = 0; w < kBefore; ++w) grads[w] = grads[w + 1];
            }
            for (int w = 0; w < kBefore; ++w) store(newest_ + w * channels_.stride + c, grads[w]);
            for (int w = 0; w <= kWidth; ++w) vector.store(sums_ + w * p_.channels + c, sums[w]);
        });
    }

    // g of a token.
    template <class Vector>
    __attribute__((always_inline)) Vec gradient(int64_t token, int64_t c, Vector vector, const Vec (&window)[kWidth],
                                                const Vec (&weights)[kWidth], Vec bias) const {
        const Vec given = vector.load(static_cast<const Element*>(gradients_.grad_out) + channels_.row(token) + c);
        if (!p_.silu) return given;
        Vec sum = bias;
        for (int w = 0; w < kWidth; ++w) sum = fma(weights[w], window[w], sum);
        const Vec one = broadcast(1.0f), s = sigmoid(sum);
        return given * s * fma(sum, one - s, one);
    }

    // The gradient of an input, whose token is the last that it reaches: grads end with that token's.
    template <class Vector>
    __attribute__((always_inline)) void write_gradient(int64_t input, int64_t c, Vector vector, const Vec (&grads)[kWidth],
                                                       const Vec (&weights)[kWidth]) const {
        const bool is_before = input < 0;  // it stands in the state
        if (!is_before && input < task_.begin) return;  // of the task before this one
        Vec grad = zero();
        for (int w = 0; w < kWidth; ++w) grad = fma(weights[w], grads[kBefore - w], grad);
        const int64_t in_state = input - task_.num_tokens + kBefore;
        if (in_state >= 0) grad = grad + load(of_final_state_ + in_state * channels_.stride + c);
        if (is_before) {
            store(of_initial_state_ + (input + kBefore) * channels_.stride + c, grad);
        } else if (gradients_.grad_x != nullptr) {
            vector.store(static_cast<Element*>(gradients_.grad_x) + channels_.row(input) + c, grad);
        }
    }

    // The first element of a contiguous state of the task.
    int64_t state_at() const { return (task_.sequence * p_.channels + task_.first_channel) * kBefore; }

    void read_gradients_of_state() const {
        const int64_t count = task_.num_channels * kBefore;
        float* const given = of_initial_state_;
        widen_row(static_cast<const Element*>(gradients_.grad_final_state) + state_at(), given, count, count);
        for (int64_t c = 0; c < task_.num_channels; ++c)
            for (int w = 0; w < kBefore; ++w) of_final_state_[w * channels_.stride + c] = given[c * kBefore + w];
    }

    void write_gradients_of_state() const {
        float* const found = of_final_state_;
        for (int64_t c = 0; c < task_.num_channels; ++c)
            for (int w = 0; w < kBefore; ++w) found[c * kBefore + w] = of_initial_state_[w * channels_.stride + c];
        narrow_row(found, static_cast<Element*>(gradients_.grad_initial_state) + state_at(), task_.num_channels * kBefore);
    }

    const FaConvolutionParams& p_;
    const FaConvolutionGradients& gradients_;
    const ConvolutionTask& task_;
    const Channels channels_;
    float* const sums_;  // (width + 1, p_.channels) from the first channel of the task on
    float *const newest_, *const of_final_state_, *const of_initial_state_;  // (kBefore, stride)
};

// Adds up what all ranges of tokens give for weights and bias.
static void write_parameter_gradients(const FaConvolutionParams& p, const FaConvolutionGradients& gradients,
                                      const float* sums, int64_t num_ranges, int64_t first_channel, int64_t num_channels,
                                      float* scratch) {
    const int64_t stride = round_up(num_channels, Vec::kWidth);
    float* const total = scratch;  // (width + 1, stride)
    float* const by_channel = total + (p.width + 1) * stride;  // (num_channels, width)
    memset(total, 0, (p.width + 1) * stride * sizeof(float));
    for (int64_t range = 0; range < num_ranges; ++range)
        for (int64_t w = 0; w <= p.width; ++w) {
            const float* const from = sums + (range * (p.width + 1) + w) * p.channels + first_channel;
            for (int64_t c = 0; c < num_channels; ++c) total[w * stride + c] += from[c];
        }
    if (gradients.grad_weight != nullptr) {
        for (int64_t c = 0; c < num_channels; ++c)
            for (int64_t w = 0; w < p.width; ++w) by_channel[c * p.width + w] = total[w * stride + c];
        narrow_any(by_channel, gradients.grad_weight, p.weight_dtype, first_channel * p.width, num_channels * p.width);
    }
    if (gradients.grad_bias != nullptr)
        narrow_any(total + p.width * stride, gradients.grad_bias, p.bias_dtype, first_channel, num_channels);
}

}  // namespace FA_NAMESPACE
