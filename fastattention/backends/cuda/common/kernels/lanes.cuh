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
