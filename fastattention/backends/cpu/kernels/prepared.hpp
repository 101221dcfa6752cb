// Calls that are prepared by one thread and run later by another, which may be one that knows nothing but a function and
// its argument.
#pragma once

#include "params.h"
#include "plan.hpp"

namespace fastattention {

// The memory that `params` names must stay until the call has run.
struct Prepared {
    const Kernels& kernels;
    FaAttentionParams params;
    bool failed;  // memory ran out: all results are NaN
};

// One at a time: a second caller waits, where forward() would have it do its work without other threads.
void run(Prepared& call);

}  // namespace fastattention
