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
          planes_(at_ + planes_at) {}

    // The lane's key dimension of the tokens of its part.
    struct Lane {
        float x[kPart];
    };

    // The lane's key dimension of a query or key, as it is in memory.
    FA_DEVICE float given(Kind kind, int token) const {
        const bool is_query = kind == kQueries;
        const int64_t batch = is_query ? call_.q_stride_batch : call_.k_stride_batch;
        const int64_t head = is_query ? call_.q_stride_head : call_.k_stride_head;
        const int stride = is_query ? call_.q_stride_row : call_.k_stride_row;
        if (token >= num_tokens() || key_ >= call_.columns_k) return 0.0f;
        const uint16_t* const from =
            (is_query ? call_.q : call_.k) + sequence_.offset(batch, stride, head, head_ / call_.group_size) + key_;
        return Element::widen(from[static_cast<int64_t>(chunk_ * kChunk + token) * stride]);
    }

    // The same, normalized if the call asks for it.
    FA_DEVICE float normalized(Kind kind, int token) const {
        return given(kind, token) * planes_.load(kKeyLength + kind, token);
    }

    FA_DEVICE Lane read_normalized(Kind kind) const {
        Lane lane;
#pragma unroll
        for (int i = 0; i < kPart; ++i) lane.x[i] = normalized(kind, first_ + i);
        return lane;
    }

    FA_DEVICE Lane read_gates() const {
        Lane lane;
        const int64_t from = sequence_.offset(call_.g_stride_batch, call_.g_stride_row, call_.g_stride_head, head_) + key_;
#pragma unroll
        for (int i = 0; i < kPart; ++i) {
            const int64_t row = chunk_ * kChunk + first_ + i;
            const bool valid = first_ + i < num_tokens() && key_ < call_.headdim_k;
            lane.x[i] = 1.0f;
            if (valid)
                lane.x[i] = exp2_approximate(
                    widen_bits(read_bits(call_.g, from + row * call_.g_stride_row, call_.gate_format), call_.gate_format) *
                    kLog2E);
        }
        return lane;
    }

    // Leaves the sum over the warp's key dimensions for each token of a part.
    FA_DEVICE void leave_sums(int plane, Lane& lane) const {
        float sum = own_sum_of_lanes<kPart>(lane.x);
        if constexpr (kPartColumns > kPart) sum += shuffle_xor(sum, kPart);
        const int token = lane_index() % kPartColumns;
        if (token < kPart) planes_.store(plane + part_, first_ + token, sum);
    }

    FA_DEVICE void find_lengths() const {
        for (const Kind kind : {kKeys, kQueries}) {
            Lane squares;
#pragma unroll
            for (int i = 0; i < kPart; ++i) {
                const float x = given(kind, first_ + i);
                squares.x[i] = x * x;
            }
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

    const int first_, key_;  // the first token of the lane's part, and its key dimension
    const TokenPlanes planes_;
};

}  // namespace fastattention
