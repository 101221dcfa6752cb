// Calls that one thread prepares and another runs later, given only a function and its argument.
#pragma once

#include "attention/params.h"
#include "attention/plan.hpp"

namespace fastattention {

// The memory that `params` names must stay until the call has been run.
class Prepared {
public:
    Prepared(const AttentionKernels& kernels, const FaAttentionParams& params) : kernels_(kernels), params_(params) {}
    Prepared(const Prepared&) = delete;
    Prepared& operator=(const Prepared&) = delete;

    // Calls run one at a time: a second caller waits, whereas forward() would let it work alone, without the pool.
    void run();

    // Whether memory ran out in `run`. All results are then NaN.
    bool failed() const { return failed_; }

private:
    void spoil();

    const AttentionKernels& kernels_;
    const FaAttentionParams params_;
    bool failed_ = false;
};

}  // namespace fastattention
