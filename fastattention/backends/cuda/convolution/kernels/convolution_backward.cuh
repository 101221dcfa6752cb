// Gradients of the causal convolution. With g[t] the gradient of what the filter gives for token t, before SiLU:
//
//     grad_x[s]      = sum_w weight[w] g[s + width - 1 - w], over tokens of the sequence, + its part of grad_final_state
//     grad_weight[w] = sum_t g[t] x[t - width + 1 + w]
//     grad_bias      = sum_t g[t]
//
// Tokens before the sequence stand in its state. A CTA goes on for width - 1 tokens after its own, which only gradients of its
// last tokens need. It leaves sums of its own tokens, which a second kernel adds up in the order of tokens: so gradients of
// filters have the same bits in every run.
#pragma once

#include "filters.cuh"

namespace fastattention {

// Warps for which a multiprocessor has registers. For 16 of them, float16 would spill.
constexpr int kBackwardWarpsOfSm = 12;

class ConvolutionBackward {
    using Format = Filters::Format;
    using Item = Format::Item;
    using Four = Format::Four;
    static constexpr int kStep = Config::float32 ? 2 : 4;  // tokens that are read at a time, of x and of grad_out

public:
    FA_DEVICE ConvolutionBackward(const ConvolutionBackwardParams& p, const TokenRange& range, int tile)
        : p_(p), range_(range), filters_(p.call, range, tile) {}

    FA_DEVICE void run() {
        if (filters_.count() <= 0) return;
        // A sequence without tokens has states all the same.
        if (range_.first < range_.last || (range_.first == 0 && p_.grad_initial_state != nullptr)) compute();
        write_sums();
    }

private:
    FA_DEVICE void compute() {
        filters_.read_filters(weights_, bias_);
        filters_.read_window(window_);
        const int end = (range_.last > range_.first ? range_.last : range_.first) + kBefore;
        for (int token = range_.first; token < end; token += kStep) {
            Four x[kStep], grad_out[kStep];
#pragma unroll
            for (int step = 0; step < kStep; ++step) {
                const bool valid = token + step < range_.length && token + step < end;
                x[step] = valid ? filters_.read(token + step) : Four{};
                grad_out[step] = valid && p_.grad_out != nullptr ? read_grad_out(token + step) : Four{};
            }
#pragma unroll
            for (int step = 0; step < kStep; ++step) {
                if (token + step < end) advance(token + step, x[step], grad_out[step]);
            }
        }
    }

    FA_DEVICE Four read_grad_out(int token) const {
        return Columns<Format>::read(static_cast<const Item*>(p_.grad_out) + filters_.element(token), filters_.count());
    }

    // Takes in a token, which may be after the sequence, and writes the gradient of the input that reaches no later one.
    FA_DEVICE void advance(int token, const Four& x, const Four& grad_out) {
#pragma unroll
        for (int i = 0; i < kChannels; ++i) {
            window_[kBefore][i] = Format::widen(Format::get(x, i));
            grads_[kBefore][i] = token < range_.length ? gradient(i, Format::widen(Format::get(grad_out, i))) : 0.0f;
            if (token < range_.last) {
#pragma unroll
                for (int w = 0; w < kWidth; ++w) sums_[w][i] = multiply_add(grads_[kBefore][i], window_[w][i], sums_[w][i]);
                sums_[kWidth][i] += grads_[kBefore][i];
            }
        }
        const int input = token - kBefore;
        if (input < 0 || input >= range_.first) write_gradient(input);
        Filters::shift(window_);
        Filters::shift(grads_);
    }

    // g of the last token of the window.
    FA_DEVICE float gradient(int i, float grad_out) const {
        if (!p_.call.silu) return grad_out;
        const float sum = Filters::filtered(weights_, bias_, window_, i), s = sigmoid(sum);
        return grad_out * s * (1.0f + sum * (1.0f - s));
    }

    FA_DEVICE void write_gradient(int input) const {
        float grad[kChannels];
        const int in_state = input - range_.length + kBefore;
#pragma unroll
        for (int i = 0; i < kChannels; ++i) {
            grad[i] = 0.0f;
#pragma unroll
            for (int w = 0; w < kWidth; ++w) grad[i] = multiply_add(weights_[w][i], grads_[kBefore - w][i], grad[i]);
            if (in_state >= 0 && p_.grad_final_state != nullptr && i < filters_.count())
                grad[i] += Format::widen(static_cast<const Item*>(p_.grad_final_state)[in_states(i) + in_state]);
        }
        if (input >= 0) {
            if (p_.grad_x == nullptr) return;
            Item* to = static_cast<Item*>(p_.grad_x) + filters_.element(input);
            Columns<Format>::write(to, filters_.count(), Format::narrow(grad));
        } else if (p_.grad_initial_state != nullptr) {
#pragma unroll
            for (int i = 0; i < kChannels; ++i)
                if (i < filters_.count())
                    write_any(p_.grad_initial_state, in_states(i) + input + kBefore, p_.call.state_dtype, grad[i]);
        }
    }

    // Index of the first input of channel i of the thread, in contiguous states.
    FA_DEVICE int64_t in_states(int i) const {
        return (static_cast<int64_t>(range_.sequence) * p_.call.channels + filters_.channel() + i) * kBefore;
    }

    FA_DEVICE void write_sums() const {
#pragma unroll
        for (int w = 0; w <= kWidth; ++w) {
            float* to = p_.sums + (range_.index * (kWidth + 1) + w) * p_.call.channels + filters_.channel();
            Columns<InFloats>::write(to, filters_.count(), InFloats::narrow(sums_[w]));
        }
    }

    const ConvolutionBackwardParams& p_;
    const TokenRange& range_;
    const Filters filters_;
    float weights_[kWidth][kChannels], bias_[kChannels];
    float window_[kWidth][kChannels];  // inputs, up to the newest token
    float grads_[kWidth][kChannels] = {};  // g, up to the newest token
    float sums_[kWidth + 1][kChannels] = {};  // gradients of weights and bias
};

}  // namespace fastattention

extern "C" FA_KERNEL void FA_LAUNCH_BOUNDS(fastattention::kConvolutionThreads,
                                           fastattention::kBackwardWarpsOfSm / fastattention::Config::num_warps)
    fastattention_convolution_backward(FA_PARAMETER fastattention::ConvolutionBackwardParams params) {
    using namespace fastattention;
    const int64_t index = cta_index() / params.call.channel_tiles;
    const TokenRange range(params.call, index);
    ConvolutionBackward(params, range, static_cast<int>(cta_index() - index * params.call.channel_tiles)).run();
}

// A thread adds up one weight, or a bias, over all ranges of tokens.
extern "C" FA_KERNEL void FA_LAUNCH_BOUNDS(fastattention::kConvolutionThreads, 1)
    fastattention_convolution_sums(FA_PARAMETER fastattention::ConvolutionBackwardParams params) {
    using namespace fastattention;
    const int64_t channels = params.call.channels, stride = (kWidth + 1) * channels;
    const int64_t index = cta_index() * kConvolutionThreads + thread_index();
    if (index >= stride) return;
    float sum = 0.0f;
#pragma unroll 8
    for (int range = 0; range < params.num_ranges; ++range) sum += params.sums[range * stride + index];
    const int64_t w = index / channels, channel = index - w * channels;
    if (w == kWidth) {
        if (params.grad_bias != nullptr) write_any(params.grad_bias, channel, params.call.bias_dtype, sum);
    } else if (params.grad_weight != nullptr) {
        write_any(params.grad_weight, channel * kWidth + w, params.call.weight_dtype, sum);
    }
}
