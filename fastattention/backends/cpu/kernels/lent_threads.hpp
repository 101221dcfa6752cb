// The threads of the OpenMP that torch computes with. After each of its operations they look for work for milliseconds, on
// cores that workers of ours would have to share with them: the layers of a model are torch's and ours by turns. While
// they are awake they do our work too. When they sleep they are left alone: waking them may take milliseconds as well.
#pragma once

#include <time.h>

#include <cstdint>

#include "thread_pool.hpp"

namespace fastattention {

// GOMP_parallel and omp_get_max_threads of an OpenMP that code of GNU's compilers can use; null for none. A forked child has
// none, since OpenMP does not work there.
struct OpenMp {
    void (*parallel)(void (*function)(void*), void* data, unsigned num_threads, unsigned flags) = nullptr;
    int (*max_threads)() = nullptr;
};
void lend_threads(OpenMp openmp);

// The calling thread does without them from now on.
void decline_lent_threads();

// What a clock shows: a thread's, of what it has spent on processors, or another.
double clock_seconds(clockid_t clock);

// Whether they are awake, as it was found a few of the system's ticks ago. Calls come one at a time.
class Wakefulness {
public:
    // Whether it is time to look again.
    bool is_due();
    // worker_seconds: that workers of ours, which are not lent, have spent on processors.
    void look(double worker_seconds);
    bool are_awake() const { return are_awake_; }

private:
    double looked_at_ = 0.0;
    double used_ = 0.0;  // seconds that the rest of the process had spent on processors then
    bool are_awake_ = false;
};

// parallel_for on lent threads, of which the caller is one. False, with nothing done, if there are not as many.
bool run_on_lent_threads(int64_t count, int num_threads, Task task, void* context);

}  // namespace fastattention
