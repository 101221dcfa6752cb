// The threads of the OpenMP that torch computes with. After each of its operations they look for work for milliseconds, on
// cores that workers of ours would have to share with them: the layers of a model are torch's and ours by turns. While
// they are awake they do our work too. When they sleep they are left alone: waking them may take milliseconds as well.
#pragma once

#include <time.h>

#include <cstdint>

#include "common/thread_pool.hpp"

namespace fastattention {

// GOMP_parallel and omp_get_max_threads of an OpenMP that code of GNU's compilers can use; null for none. A forked child has
// none, since OpenMP does not work there.
struct OpenMp {
    void (*parallel)(void (*function)(void*), void* data, unsigned num_threads, unsigned flags) = nullptr;
    int (*max_threads)() = nullptr;
};
void set_omp_team(OpenMp openmp);

// The calling thread does not use them from now on.
void decline_omp_team();

// What a clock shows: a thread's, of what it has spent on processors, or another.
double clock_seconds(clockid_t clock);

// Whether the OpenMP threads are awake, sampled every few ticks of the system. Calls come one at a time.
class OmpActivityProbe {
public:
    // Whether it is time to sample again.
    bool is_due();
    // worker_seconds: that workers of our own pool have spent on processors.
    void sample(double worker_seconds);
    bool is_active() const { return is_active_; }

private:
    double sampled_at_ = 0.0;
    double used_ = 0.0;  // seconds that the rest of the process had spent on processors then
    bool is_active_ = false;
};

// parallel_for on the OpenMP team, of which the caller is one. False, with nothing done, if there are not as many.
bool run_on_omp_team(int64_t count, int num_threads, Task task, void* context);

}  // namespace fastattention
