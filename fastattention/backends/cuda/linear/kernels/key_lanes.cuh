// What a lane of key_gradients.cuh reads: its key dimension of the 16 tokens of a part of a chunk. Where a warp's step has two
// parts, each has half of the lanes.
#pragma once

#include "token_products.cuh"

namespace fastattention {

constexpr int kPart = 16, kParts = kChunk / kPart;
static_assert(kGatePerKey && Arch::kStepRows / kPart * kPartColumns == 32,
              "a lane has a part and a key dimension of its warp");

// Planes of TokenPlanes.
enum TokenPlane {
    kBetaPlane,
    kKeyLength,  // inverses, as kQueryLength
    kQueryLength,
    kValuePlane,  // x . v
    kAskedPlane,  // the key and the gradient of its question, before beta
    kAlongQuery = kAskedPlane + kDeltaRule * kColumnParts,  // gradient and query, multiplied; squares of queries before
    kAlongKey = kAlongQuery + kColumnParts,
    kTokenPlanes = kAlongKey + kColumnParts,
};

class KeyLanes : protected TokenProducts {
protected:
    enum Kind { kKeys, kQueries, kAsking };  // rows of tokens; tiles of them are in this order

    // planes_at: where TokenPlanes begin in shared memory
    FA_DEVICE KeyLanes(const GradientParams& p, const Sequence& sequence, int chunk, int head, int planes_at)
        : TokenProducts(p, sequence, chunk, head),
          first_(row_ + lane_index() / kPartColumns * kPart),
          key_(first_column() + lane_index() % kPartColumns),
          count_(num_tokens() - first_),
          key_head_(head / p.call.group_size),
          planes_(at_ + planes_at) {}

    // The lane's key dimension of the tokens of its part.
    struct Lane {
        float x[kPart];
    };

    // A number of each token of the part.
    FA_DEVICE Lane read_plane(int plane) const {
        Lane lane;
#pragma unroll
        for (int i = 0; i < kPart; i += 4) load_numbers(planes_.at(plane, first_ + i), &lane.x[i]);
        return lane;
    }

    // Queries or keys, as they are in memory.
    FA_DEVICE Lane read_given(Kind kind) const {
        const TokenRows rows = kind == kQueries
                                   ? TokenRows{call_.q, call_.q_stride_batch, call_.q_stride_row, call_.q_stride_head}
                                   : TokenRows{call_.k, call_.k_stride_batch, call_.k_stride_row, call_.k_stride_head};
        uint32_t words[kPart];
        read_words(words, rows.base + sequence_.offset(rows.stride_batch, rows.stride_row, rows.stride_head, key_head_),
                   rows.stride_row, call_.columns_k);
        Lane lane;
#pragma unroll
        for (int i = 0; i < kPart; ++i)
            lane.x[i] = has(i, call_.columns_k) ? Element::widen(static_cast<uint16_t>(words[i])) : 0.0f;
        return lane;
    }

    // The same, normalized if the call asks for it.
    FA_DEVICE Lane read_normalized(Kind kind) const {
        Lane lane = read_given(kind);
        if (!call_.normalizes) return lane;
        const Lane lengths = read_plane(kKeyLength + kind);
#pragma unroll
        for (int i = 0; i < kPart; ++i) lane.x[i] *= lengths.x[i];
        return lane;
    }

    // Padding tokens leave the state unchanged.
    FA_DEVICE Lane read_gates() const {
        const int64_t from = sequence_.offset(call_.g_stride_batch, call_.g_stride_row, call_.g_stride_head, head_);
        uint32_t words[kPart];
        if constexpr (Config::gate_format == kFloat32) {
            read_words(words, static_cast<const uint32_t*>(call_.g) + from, call_.g_stride_row, call_.headdim_k);
        } else {
            read_words(words, static_cast<const uint16_t*>(call_.g) + from, call_.g_stride_row, call_.headdim_k);
        }
        Lane lane;
#pragma unroll
        for (int i = 0; i < kPart; ++i) {
            const float gate = exp2_approximate(widen_bits(words[i], Config::gate_format) * kLog2E);
            lane.x[i] = has(i, call_.headdim_k) ? gate : 1.0f;
        }
        return lane;
    }

    // Whether token i of the part exists, and the lane's key dimension, of `columns`.
    FA_DEVICE bool has(int i, int columns) const { return i < count_ && key_ < columns; }

    // Leaves the sum over the warp's key dimensions for each token of a part.
    FA_DEVICE void leave_sums(int plane, Lane& lane) const {
        float sum = own_sum_of_lanes<kPart>(lane.x);
        if constexpr (kPartColumns > kPart) sum += shuffle_xor(sum, kPart);
        const int token = lane_index() % kPartColumns;
        if (token < kPart) planes_.store(plane + part_, first_ + token, sum);
    }

    FA_DEVICE void find_lengths() const {
        for (const Kind kind : {kKeys, kQueries}) {
            Lane squares = read_given(kind);
#pragma unroll
            for (int i = 0; i < kPart; ++i) squares.x[i] *= squares.x[i];
            leave_sums(kind == kKeys ? kAlongKey : kAlongQuery, squares);
        }
        cta_barrier();
        if (thread_index() < kChunk)
            for (const Kind kind : {kKeys, kQueries}) {
                const float sum = planes_.sum(kind == kKeys ? kAlongKey : kAlongQuery, kColumnParts, thread_index());
                planes_.store(kKeyLength + kind, thread_index(), reciprocal_root(sum + kLengthEpsilon));
            }
        cta_barrier();
    }

    // Reads the lane's key dimension of a part's tokens from rows of a sequence. Where there is none, its neighbour is read:
    // branches would keep reads apart.
    template <class Word>
    FA_DEVICE void read_words(uint32_t (&words)[kPart], const Word* rows, int64_t stride, int columns) const {
        const int last = num_tokens() - 1;
        const Word* at =
            rows + (chunk_ * kChunk + (first_ < last ? first_ : last)) * stride + (key_ < columns ? key_ : columns - 1);
#pragma unroll
        for (int i = 0; i < kPart; ++i) {
            words[i] = *at;
            if (i + 1 < count_) at += stride;
        }
    }

    const int first_, key_;  // the first token of the lane's part, and its key dimension
    const int count_;  // tokens from there to the end of the sequence
    const int key_head_;
    const TokenPlanes planes_;
};

}  // namespace fastattention
