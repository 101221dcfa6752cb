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
FA_DEVICE float own_sum_of_lanes(float (&x)[kLanes]) {
#pragma unroll
    for (int count = kLanes / 2; count > 0; count >>= 1) {
        const bool second = lane_index() & count;
#pragma unroll
        for (int i = 0; i < kLanes / 2; ++i) {
            if (i >= count) break;  // with `count` as its limit, the loop is not unrolled everywhere
            const float sent = second ? x[i] : x[i + count], kept = second ? x[i + count] : x[i];
            x[i] = kept + shuffle_xor(sent, count);
        }
    }
    return x[0];
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
