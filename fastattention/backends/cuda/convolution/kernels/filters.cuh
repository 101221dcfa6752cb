// What both passes of the causal convolution share: the tokens and channels of a CTA, filters, states, and SiLU.
// fastattention/convolution/reference.py has the formulas.
//
// A thread has four neighbouring channels, and goes through the tokens of its CTA. The tokens before the next one stay in its
// registers, so that x is read once but for the first of them. Memory bandwidth limits both passes: a thread reads several
// tokens before it computes the first of them.
#pragma once

#include "any_dtype.cuh"
#include "columns.cuh"
#include "convolution_params.h"

namespace fastattention {

constexpr int kConvolutionThreads = Config::num_warps * 32;
constexpr int kWidth = Config::width;
constexpr int kBefore = kWidth - 1;  // tokens before one that it needs
constexpr int kChannels = 4;  // of a thread

FA_DEVICE float sigmoid(float x) { return reciprocal_approximate(1.0f + exp_exact(-x)); }

// The tokens of a CTA. Ranges of all sequences have one index; each sequence has one at least, because it has states.
struct TokenRange {
    int64_t index;
    int sequence, batch;
    int begin;  // the first token of the sequence, in its row of the batch
    int length;  // of the sequence
    int first, last;  // tokens of the range, counted from the beginning of the sequence; none where first >= last

    FA_DEVICE TokenRange(const ConvolutionParams& p, int64_t range) : index(range) {
        int part;
        if (p.cu_seqlens == nullptr) {
            sequence = batch = static_cast<int>(range / p.ranges_of_row);
            part = static_cast<int>(range - static_cast<int64_t>(sequence) * p.ranges_of_row);
            begin = 0;
            length = p.seqlen;
        } else {
            sequence = sequence_of(p, static_cast<int>(range));
            batch = 0;
            begin = p.cu_seqlens[sequence];
            length = p.cu_seqlens[sequence + 1] - begin;
            part = static_cast<int>(range) - first_range(p, sequence);
        }
        first = part * p.range_tokens;
        last = length - first < p.range_tokens ? length : first + p.range_tokens;
    }

    // Whether the range is the one after which the sequence ends.
    FA_DEVICE bool ends_sequence() const { return last == length && (first < last || first == 0); }

private:
    // Ranges before a sequence. They are known without a sum over lengths, and enough: a sequence of n tokens from token b on
    // has floor((b + n) / size) - floor(b / size) + 1 ranges, of which the last may be empty.
    static FA_DEVICE int first_range(const ConvolutionParams& p, int sequence) {
        return quotient(p.cu_seqlens[sequence], p.range_tokens) + sequence;
    }

    // The last sequence whose first range is not after `range`.
    static FA_DEVICE int sequence_of(const ConvolutionParams& p, int range) {
        int low = 0, high = p.num_sequences - 1;
        while (low < high) {
            const int middle = (low + high + 1) / 2;
            if (first_range(p, middle) <= range) {
                low = middle;
            } else {
                high = middle - 1;
            }
        }
        return low;
    }
};

// The channels of a thread, for a range of tokens.
class Filters {
public:
    using Format = FormatOf<Config::float32>::Type;
    using Item = Format::Item;
    using Four = Format::Four;

    FA_DEVICE Filters(const ConvolutionParams& p, const TokenRange& range, int tile)
        : p_(p), range_(range), channel_((tile * kConvolutionThreads + thread_index()) * kChannels) {
        x_ = static_cast<const Item*>(p.x) + range.batch * p.x_stride_batch + range.begin * p.x_stride_token + channel_;
    }

    FA_DEVICE int channel() const { return channel_; }
    // Channels from the first one of the thread on; at most 0 for a thread without any.
    FA_DEVICE int count() const { return p_.channels - channel_; }

    // Index of the thread's first element of a token, in a contiguous tensor like x.
    FA_DEVICE int64_t element(int token) const {
        return (static_cast<int64_t>(range_.batch) * p_.seqlen + range_.begin + token) * p_.channels + channel_;
    }

    FA_DEVICE Four read(int token) const { return Columns<Format>::read(x_ + token * p_.x_stride_token, count()); }
    FA_DEVICE float read(int token, int i) const { return Format::widen(x_[token * p_.x_stride_token + i]); }

    FA_DEVICE void read_filters(float (&weights)[kWidth][kChannels], float (&bias)[kChannels]) const {
#pragma unroll
        for (int i = 0; i < kChannels; ++i) {
            const bool valid = i < count();
#pragma unroll
            for (int w = 0; w < kWidth; ++w) {
                const int64_t at = static_cast<int64_t>(channel_ + i) * kWidth + w;
                weights[w][i] = valid ? widen_bits(read_bits(p_.weight, at, p_.weight_dtype), p_.weight_dtype) : 0.0f;
            }
            const bool has_bias = valid && p_.bias != nullptr;
            bias[i] = has_bias ? widen_bits(read_bits(p_.bias, channel_ + i, p_.bias_dtype), p_.bias_dtype) : 0.0f;
        }
    }

    // The inputs before the first token of the range: of x, or of the state.
    FA_DEVICE void read_window(float (&window)[kWidth][kChannels]) const {
#pragma unroll
        for (int w = 0; w < kBefore; ++w) {
            const int token = range_.first - kBefore + w;
            const Four four = token >= 0 && range_.first < range_.last ? read(token) : Four{};
#pragma unroll
            for (int i = 0; i < kChannels; ++i) {
                window[w][i] = token >= 0 ? Format::widen(Format::get(four, i)) : initial(p_.state_len + token, i);
            }
        }
    }

    // Input `input` of the state before the sequence, of channel i of the thread.
    FA_DEVICE float initial(int input, int i) const {
        if (p_.initial_state == nullptr || i >= count()) return 0.0f;
        const int64_t at = range_.sequence * p_.initial_stride_sequence + (channel_ + i) * p_.initial_stride_channel +
                           input * p_.initial_stride_input;
        return widen_bits(read_bits(p_.initial_state, at, p_.state_dtype), p_.state_dtype);
    }

    // What the filter gives for the last token of a window, before SiLU.
    static FA_DEVICE float filtered(const float (&weights)[kWidth][kChannels], const float (&bias)[kChannels],
                                    const float (&window)[kWidth][kChannels], int i) {
        float sum = bias[i];
#pragma unroll
        for (int w = 0; w < kWidth; ++w) sum = multiply_add(weights[w][i], window[w][i], sum);
        return sum;
    }

    // Moves a window one token on.
    static FA_DEVICE void shift(float (&window)[kWidth][kChannels]) {
#pragma unroll
        for (int w = 0; w < kBefore; ++w)
#pragma unroll
            for (int i = 0; i < kChannels; ++i) window[w][i] = window[w + 1][i];
    }

private:
    const ConvolutionParams& p_;
    const TokenRange& range_;
    const int channel_;
    const Item* x_;  // the first token of the sequence
};

}  // namespace fastattention
