// Calls that are prepared by one thread and run later by another, which may be one that knows nothing but a function and
// its argument.
#pragma once

#include "attention/params.h"
#include "attention/kernel_table.hpp"

namespace fastattention {

// The memory that `params` names must stay until the call has been run.
class Prepared {
public:
    Prepared(const AttentionKernels& kernels, const FaAttentionParams& params) : kernels_(kernels), params_(params) {}
    Prepared(const Prepared&) = delete;
    Prepared& operator=(const Prepared&) = delete;

    // One at a time: a second caller waits, where forward() would have it do its work without other threads.
    void run();

    // Whether memory ran out in `run`: all results are NaN then.
    bool failed() const { return failed_; }

private:
    void spoil();

    const AttentionKernels& kernels_;
    const FaAttentionParams params_;
    bool failed_ = false;
};

}  // namespace fastattention
