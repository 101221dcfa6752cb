// The causal convolution of the tokens and channels of a task, and the state after its sequence.
#pragma once

namespace FA_NAMESPACE {

template <class Element, int kWidth>
class ConvolutionForward {
    using Channels = ConvolutionChannels<Element, kWidth>;

public:
    ConvolutionForward(const FaConvolutionParams& p, const ConvolutionTask& task, float* scratch)
        : p_(p), task_(task), channels_(p, task, scratch) {}

    void run() const {
        int64_t token = task_.begin;
        for (; token + Channels::kBlockTokens <= task_.end; token += Channels::kBlockTokens)
            block<Channels::kBlockTokens>(token, Channels::kBlockTokens);
        if (token < task_.end) block<0>(token, static_cast<int>(task_.end - token));
        if (task_.end < task_.num_tokens || p_.final_state == nullptr) return;
        if (p_.state_dtype == FA_FLOAT32) {
            write_state<float>();
        } else {
            write_state<Element>();
        }
    }

private:
    // kCount: the number of tokens where the compiler knows it, else 0.
    template <int kCount>
    void block(int64_t token, int count) const {
        if (kCount > 0) count = kCount;
        Element* const out = static_cast<Element*>(p_.out) + channels_.row(token);
        channels_.for_each_vector([&](int64_t c, auto vector) __attribute__((always_inline)) {
            Vec window[kWidth], weights[kWidth];
            channels_.read_window(window, token, c, vector);
            for (int w = 0; w < kWidth; ++w) weights[w] = load(channels_.weights + w * channels_.stride + c);
            const Vec bias = load(channels_.bias + c);
#pragma GCC unroll 8
            for (int i = 0; i < count; ++i) {
                window[kWidth - 1] = vector.load(channels_.x(token + i) + c);
                Vec sum = bias;
                for (int w = 0; w < kWidth; ++w) sum = fma(weights[w], window[w], sum);
                if (p_.silu) sum = sum * sigmoid(sum);
                vector.store(out + i * p_.channels + c, sum);
                for (int w = 0; w + 1 < kWidth; ++w) window[w] = window[w + 1];
            }
        });
    }

    // Inputs of the new state are those of the old one, shifted, and then the newest tokens. In an update both states are the
    // same memory: an input is read before it is overwritten, because it moves to a lower index.
    template <class State>
    void write_state() const {
        const State* const old = static_cast<const State*>(p_.initial_state) + task_.sequence * p_.initial_stride_sequence +
                                 task_.first_channel * p_.initial_stride_channel;
        State* const state = static_cast<State*>(p_.final_state) + task_.sequence * p_.final_stride_sequence +
                             task_.first_channel * p_.final_stride_channel;
        State* const row = reinterpret_cast<State*>(channels_.free);
        for (int64_t input = 0; input < p_.state_len; ++input) {
            const int64_t token = task_.num_tokens + input - p_.state_len;
            if (token >= 0) {
                copy_row(channels_.x(token), row);
            } else if (p_.initial_state != nullptr) {
                const State* const from = old + (task_.num_tokens + input) * p_.initial_stride_input;
                for (int64_t c = 0; c < task_.num_channels; ++c) row[c] = from[c * p_.initial_stride_channel];
            } else {
                memset(row, 0, task_.num_channels * sizeof(State));
            }
            State* const to = state + input * p_.final_stride_input;
            for (int64_t c = 0; c < task_.num_channels; ++c) to[c * p_.final_stride_channel] = row[c];
        }
    }

    void copy_row(const Element* from, Element* to) const { memcpy(to, from, task_.num_channels * sizeof(Element)); }
    template <class Half>
    void copy_row(const Half* from, float* to) const {
        widen_row(from, to, task_.num_channels, task_.num_channels);
    }

    const FaConvolutionParams& p_;
    const ConvolutionTask& task_;
    const Channels channels_;
};

}  // namespace FA_NAMESPACE
