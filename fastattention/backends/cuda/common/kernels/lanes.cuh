// Reductions and scans over the lanes of a warp, by shuffles.
#pragma once

#include "intrinsics.cuh"

namespace fastattention {

FA_DEVICE int sum_of_lanes(int x) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) x += shuffle_xor(x, distance);
    return x;
}

// The sum over the group of kLanes neighbouring lanes that contains this lane; maximum_of_lanes uses the same groups.
template <int kLanes = 32>
FA_DEVICE float sum_of_lanes(float x) {
#pragma unroll
    for (int distance = kLanes / 2; distance > 0; distance /= 2) x += shuffle_xor(x, distance);
    return x;
}

// The same of kLanes values, of which each lane gets the sum with its index in the group. x is overwritten.
template <int kLanes>
FA_DEVICE float own_sum_of_lanes(const float (&x)[kLanes]) {
    if constexpr (kLanes == 1) {
        return x[0];
    } else {
        constexpr int kHalf = kLanes / 2;
        const bool second = lane_index() & kHalf;
        float sums[kHalf];
#pragma unroll
        for (int i = 0; i < kHalf; ++i) {
            const float sent = second ? x[i] : x[i + kHalf], kept = second ? x[i + kHalf] : x[i];
            sums[i] = kept + shuffle_xor(sent, kHalf);
        }
        return own_sum_of_lanes<kHalf>(sums);
    }
}

template <int kLanes = 32>
FA_DEVICE float maximum_of_lanes(float x) {
#pragma unroll
    for (int distance = kLanes / 2; distance > 0; distance /= 2) x = maximum(x, shuffle_xor(x, distance));
    return x;
}

// The sum over this lane and all lanes before it.
FA_DEVICE int sum_up_to_lane(int x) {
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const int before = shuffle(x, lane_index() - distance);
        if (lane_index() >= distance) x += before;
    }
    return x;
}

}  // namespace fastattention
