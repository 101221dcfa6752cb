// Calls that are prepared by one thread and run later by another, which may be one that knows nothing but a function and
// its argument. While none runs, what the next one will read is fetched into the processor's caches.
#pragma once

#include <vector>

#include "params.h"
#include "plan.hpp"

namespace fastattention {

struct MemoryRange {
    const char* data;
    int64_t bytes;
};

// The memory that `params` names must stay until the call has been run or given up.
class Prepared {
public:
    Prepared(const Kernels& kernels, const FaAttentionParams& params) : kernels_(kernels), params_(params) {}
    ~Prepared();
    Prepared(const Prepared&) = delete;
    Prepared& operator=(const Prepared&) = delete;

    // It will be run soon, after those of which this was said before. Keys and values are there already.
    void expect();

    // One at a time: a second caller waits, where forward() would have it do its work without other threads.
    void run();

    // Whether memory ran out in `run`: all results are NaN then.
    bool failed() const { return failed_; }

private:
    void fetch();
    void spoil();

    const Kernels& kernels_;
    const FaAttentionParams params_;
    std::vector<MemoryRange> first_read_;  // what is worth fetching
    bool failed_ = false;
};

}  // namespace fastattention
