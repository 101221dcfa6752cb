// The causal convolution, and its update of a state; filters.cuh says how threads divide the work.
#pragma once

#include "filters.cuh"

namespace fastattention {

class Convolution {
    using Format = Filters::Format;
    using Item = Format::Item;
    using Four = Format::Four;
    static constexpr int kStep = Config::float32 ? 4 : 8;  // tokens that are read at a time: 64 bytes of a thread

public:
    FA_DEVICE Convolution(const ConvolutionParams& p, const TokenRange& range, int tile)
        : p_(p), range_(range), filters_(p, range, tile) {}

    FA_DEVICE void run() const {
        if (filters_.count() <= 0) return;
        if (range_.first < range_.last) compute();
        if (p_.final_state != nullptr && range_.ends_sequence()) write_state();
    }

private:
    FA_DEVICE void compute() const {
        float weights[kWidth][kChannels], bias[kChannels], window[kWidth][kChannels];
        filters_.read_filters(weights, bias);
        filters_.read_window(window);
        for (int token = range_.first; token < range_.last; token += kStep) {
            Four read[kStep];
#pragma unroll
            for (int step = 0; step < kStep; ++step)
                read[step] = token + step < range_.last ? filters_.read(token + step) : Four{};
#pragma unroll
            for (int step = 0; step < kStep; ++step) {
                float out[kChannels];
#pragma unroll
                for (int i = 0; i < kChannels; ++i) {
                    window[kBefore][i] = Format::widen(Format::get(read[step], i));
                    out[i] = Filters::filtered(weights, bias, window, i);
                    if (p_.silu) out[i] *= sigmoid(out[i]);
                }
                if (token + step < range_.last) {
                    Item* to = static_cast<Item*>(p_.out) + filters_.element(token + step);
                    Columns<Format>::write(to, filters_.count(), Format::narrow(out));
                }
                Filters::shift(window);
            }
        }
    }

    // Inputs of the new state are those of the old one, shifted, and then the newest tokens. In an update both states are the
    // same memory: an input is read before it is overwritten, because it moves to a lower index.
    FA_DEVICE void write_state() const {
#pragma unroll
        for (int i = 0; i < kChannels; ++i) {
            if (i >= filters_.count()) break;
            const int64_t at =
                range_.sequence * p_.final_stride_sequence + (filters_.channel() + i) * p_.final_stride_channel;
            for (int input = 0; input < p_.state_len; ++input) {
                const int token = range_.length + input - p_.state_len;
                const float x = token < 0 ? filters_.initial(p_.state_len + token, i) : filters_.read(token, i);
                write_any(p_.final_state, at + input * p_.final_stride_input, p_.state_dtype, x);
            }
        }
    }

    const ConvolutionParams& p_;
    const TokenRange& range_;
    const Filters filters_;
};

}  // namespace fastattention

extern "C" FA_KERNEL void FA_LAUNCH_BOUNDS(fastattention::kConvolutionThreads, 1)
    fastattention_convolution(FA_PARAMETER fastattention::ConvolutionParams params) {
    using namespace fastattention;
    wait_for_previous_kernel();
    let_next_kernel_start();
    const int64_t index = cta_index() / params.channel_tiles;
    const TokenRange range(params, index);
    Convolution(params, range, static_cast<int>(cta_index() - index * params.channel_tiles)).run();
}
