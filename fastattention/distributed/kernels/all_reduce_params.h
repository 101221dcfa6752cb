// The arguments of all_reduce.cuh, which Python fills by name.
#pragma once

#include "integers.h"

namespace fastattention {

constexpr int kMostRanks = 8;

struct AllReduceParams {
    void* parts[kMostRanks];        // (count), of each rank: what it has computed, and then its sums
    int32_t* arrivals[kMostRanks];  // (CTAs, kMostRanks), in the memory of each rank: the last step of every rank's CTAs
    void* out;                      // (count)
    int32_t* steps;                 // (CTAs): the last step of each

    int64_t count;     // elements
    int64_t timeout;  // nanoseconds to wait for a rank

    int32_t num_ctas;
    int32_t rank;
    int32_t one_shot;  // every rank sums all elements instead of its share
};

}  // namespace fastattention
