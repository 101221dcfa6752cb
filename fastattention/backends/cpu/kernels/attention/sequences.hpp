// The sequences of a call: addresses of their tokens, and which keys their queries see.
#pragma once

#include <algorithm>

#include "attention/plan.hpp"

namespace fastattention {

int64_t size_of(int64_t dtype);  // bytes per element

struct KeyRange {
    int64_t begin, end;
    int64_t size() const { return std::max<int64_t>(end - begin, 0); }
};

// Keys that any query of the sequence sees.
KeyRange visible_keys(const TileRange& mask);

Sequence make_sequence(const Call& call, int64_t batch);

// A call's view of its arguments, without its sequences.
Call make_call(const FaAttentionParams& params);

}  // namespace fastattention
