#include "common/omp_team.hpp"

#include <pthread.h>

#include <atomic>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace fastattention {
namespace {

// The time between samples: several ticks of the system, which accounts processor time of running threads in ticks.
constexpr double kSampleSeconds = 0.025;

// The caller and the OpenMP team count as awake if they spent at least this share of that time on processors. It is less
// than 1, as other threads, such as our workers, run there too. After 10 milliseconds without work the team sleeps.
constexpr double kLeastShare = 0.75;

// The team ends a loop together. If it takes this much longer than the work, another process has the core of a thread, and
// would hold up the next calls too: the team is left alone for a while. Our workers do not wait for each other.
constexpr double kLongestWait = 0.001, kRestSeconds = 0.25;
std::atomic<double> rests_until{0.0};

std::atomic<decltype(OpenMp::parallel)> parallel{nullptr};
std::atomic<decltype(OpenMp::max_threads)> max_threads{nullptr};
thread_local bool declines = false;
thread_local int known_team = 1;  // threads of the calling thread's last team, which can be started again

struct ParallelLoop {
    int64_t count;
    int num_threads;
    Task task;
    void* context;
    std::atomic<int64_t> next{0}, done{0};
    std::atomic<int> slots{0};
    double done_at = 0.0;  // when the last task ended
};

// Every thread of the team runs this, even if there are more than the loop needs.
void help(void* data) {
    ParallelLoop& loop = *static_cast<ParallelLoop*>(data);
    const int slot = loop.slots.fetch_add(1, std::memory_order_relaxed);
    if (slot >= loop.num_threads) return;
    for (int64_t index; (index = loop.next.fetch_add(1, std::memory_order_relaxed)) < loop.count;) {
        loop.task(loop.context, index, slot);
        if (loop.done.fetch_add(1, std::memory_order_relaxed) + 1 == loop.count)
            loop.done_at = clock_seconds(CLOCK_MONOTONIC);
    }
}

// Whether `count` more threads can be started at once.
bool can_start(int count) {
    const SignalMask signals_blocked;
    std::mutex gate;
    std::vector<std::thread> threads;
    bool all = true;
    {
        std::lock_guard<std::mutex> closed(gate);
        try {
            threads.reserve(count);
            for (int i = 0; i < count; ++i) threads.emplace_back([&gate] { std::lock_guard<std::mutex> passed(gate); });
        } catch (const std::exception&) {
            all = false;
        }
    }
    for (std::thread& thread : threads) thread.join();
    return all;
}

void forget_omp_team() { set_omp_team({}); }

}  // namespace

void set_omp_team(OpenMp openmp) {
    static const bool forked_child_has_none = pthread_atfork(nullptr, nullptr, forget_omp_team) == 0;
    rests_until.store(0.0, std::memory_order_relaxed);
    max_threads.store(openmp.max_threads, std::memory_order_release);
    parallel.store(forked_child_has_none ? openmp.parallel : nullptr, std::memory_order_release);
}

void decline_omp_team() { declines = true; }

double clock_seconds(clockid_t clock) {
    timespec time{};
    clock_gettime(clock, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

bool OmpActivityProbe::is_due() {
    const bool any = parallel.load(std::memory_order_relaxed) != nullptr;
    return any && clock_seconds(CLOCK_MONOTONIC) - sampled_at_ >= kSampleSeconds;
}

void OmpActivityProbe::sample(double worker_seconds) {
    const auto most = max_threads.load(std::memory_order_acquire);
    if (most == nullptr) return;
    const double now = clock_seconds(CLOCK_MONOTONIC), used = clock_seconds(CLOCK_PROCESS_CPUTIME_ID) - worker_seconds;
    is_active_ = used - used_ >= kLeastShare * most() * (now - sampled_at_);
    sampled_at_ = now;
    used_ = used;
}

bool run_on_omp_team(int64_t count, int num_threads, Task task, void* context) {
    const auto run = parallel.load(std::memory_order_acquire);
    const auto most = max_threads.load(std::memory_order_acquire);
    if (run == nullptr || most == nullptr || declines) return false;
    if (clock_seconds(CLOCK_MONOTONIC) < rests_until.load(std::memory_order_relaxed)) return false;
    const int team = most();
    if (team < num_threads) return false;
    // OpenMP creates a team for every thread that calls it, and ends the process if it cannot start one of its threads.
    if (team > known_team && !can_start(team - 1)) {
        decline_omp_team();
        return false;
    }
    known_team = team;
    ParallelLoop loop{count, num_threads, task, context};
    run(help, &loop, 0, 0);  // 0: as many as torch uses, or threads would end now and start again with its next operation
    const double now = clock_seconds(CLOCK_MONOTONIC);
    if (now - loop.done_at > kLongestWait) rests_until.store(now + kRestSeconds, std::memory_order_relaxed);
    return true;
}

}  // namespace fastattention
