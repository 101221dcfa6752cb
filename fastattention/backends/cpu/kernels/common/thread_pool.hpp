// A small thread pool, which uses torch's threads while they are awake (omp_team.hpp).
#pragma once

#include <signal.h>

#include <cstdint>

namespace fastattention {

// Calls task(context, index, slot) once for every index in [0, count), on up to num_threads threads of which the caller is
// one, and returns when all are done. Indices are handed out in order, one at a time; slot is below num_threads and is
// held by one thread at a time. If another thread is using the pool, the caller does all of the work itself. If the
// system allows no further threads, the existing ones do the work. A task throws nothing.
using Task = void (*)(void* context, int64_t index, int slot);
void parallel_for(int64_t count, int num_threads, Task task, void* context);

// The same for a callable `work(index, slot)`.
template <class Work>
void parallel_for(int64_t count, int num_threads, Work&& work) {
    auto call = [](void* context, int64_t index, int slot) { (*static_cast<Work*>(context))(index, slot); };
    parallel_for(count, num_threads, static_cast<Task>(call), &work);
}

// Announces work while it exists: workers spin for some milliseconds before they sleep, unless they use all cores.
class StandBy {
public:
    StandBy();
    ~StandBy();
    StandBy(const StandBy&) = delete;
    StandBy& operator=(const StandBy&) = delete;
};

// Threads that are started while this exists block the signals of the process, as a program may wait for some of them in a
// thread of its choice. They still get their own faults and the signals of profilers.
class SignalBlock {
public:
    SignalBlock();
    ~SignalBlock();
    SignalBlock(const SignalBlock&) = delete;
    SignalBlock& operator=(const SignalBlock&) = delete;

private:
    sigset_t before_;
};

// Yields the core to its other hardware thread for a moment.
inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace fastattention
