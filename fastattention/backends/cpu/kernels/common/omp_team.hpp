// The threads of torch's OpenMP. After each operation of torch they spin for milliseconds, on cores that our workers would
// have to share with them, as operations of torch and ours alternate in a model. While they are awake they do our work too.
// When they sleep they are not used, because waking them may take milliseconds.
#pragma once

#include <time.h>

#include <cstdint>

#include "common/thread_pool.hpp"

namespace fastattention {

// GOMP_parallel and omp_get_max_threads of an OpenMP that is compatible with GNU compilers; null for none. A forked child
// has none, since OpenMP does not work there.
struct OpenMp {
    void (*parallel)(void (*function)(void*), void* data, unsigned num_threads, unsigned flags) = nullptr;
    int (*max_threads)() = nullptr;
};
void set_omp_team(OpenMp openmp);

// The calling thread does not use the OpenMP team from now on.
void decline_omp_team();

// The time of a clock, for example the processor time of a thread.
double clock_seconds(clockid_t clock);

// Whether the OpenMP threads are awake, sampled every few ticks of the system. Calls come one at a time.
class OmpActivityProbe {
public:
    // Whether it is time to sample again.
    bool is_due();
    // worker_seconds: processor time of the workers of our own pool.
    void sample(double worker_seconds);
    bool is_active() const { return is_active_; }

private:
    double sampled_at_ = 0.0;
    double used_ = 0.0;  // processor time of the rest of the process at the last sample
    bool is_active_ = false;
};

// parallel_for on the OpenMP team, which includes the caller. Returns false, and does nothing, if the team is too small, or
// has been held up by another process a moment ago.
bool run_on_omp_team(int64_t count, int num_threads, Task task, void* context);

}  // namespace fastattention
