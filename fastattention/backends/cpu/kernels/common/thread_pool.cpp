#include "common/thread_pool.hpp"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include "common/omp_team.hpp"
#include "common/wait_for.hpp"

namespace fastattention {
namespace {

// Workers look for work this many times before they sleep. That takes about 20 microseconds: longer than the gap between the
// stages of a call, and too short to disturb another thread of the same core.
constexpr int kSpins = 400;

// The same when work is about to come: about two milliseconds.
constexpr int kStandBySpins = 100 * kSpins;

std::atomic<int> stand_bys{0};

class Pool {
public:
    void run(int64_t count, int num_threads, Task task, void* context) {
        std::unique_lock<std::mutex> owner(owner_, std::try_to_lock);
        if (!owner.owns_lock()) return run_alone(count, task, context);
        if (omp_activity_.is_due()) omp_activity_.sample(worker_seconds());
        if (omp_activity_.is_active() && run_on_omp_team(count, num_threads, task, context)) return;
        run_on_workers(count, num_threads, task, context);
    }

    static void run_alone(int64_t count, Task task, void* context) {
        for (int64_t index = 0; index < count; ++index) task(context, index, 0);
    }

private:
    void run_on_workers(int64_t count, int num_threads, Task task, void* context) {
        grow(num_threads - 1);
        const int helpers = std::min(num_threads - 1, num_workers_);
        if (helpers == 0) return run_alone(count, task, context);
        leaves_a_core_.store(helpers + 1 < num_cores_, std::memory_order_relaxed);
        {
            std::lock_guard<std::mutex> lock(mutex_);
            task_ = task;
            context_ = context;
            count_ = count;
            next_.store(0, std::memory_order_relaxed);
            helpers_ = helpers;
            generation_.fetch_add(1, std::memory_order_release);
        }
        wake_.notify_all();
        take(0);
        {
            // Nothing is left to take. A helper that has not begun, since another process has its core, is not waited for.
            std::lock_guard<std::mutex> lock(mutex_);
            helpers_ = 0;
        }
        wait_for_helpers();
    }

    // Starts workers until there are `wanted`, or as many as the system allows now.
    void grow(int wanted) {
        if (num_workers_ >= wanted) return;
        const SignalMask signals_blocked;
        try {
            clocks_.reserve(wanted);
            while (num_workers_ < wanted) {
                const int slot = num_workers_ + 1;
                const uint64_t seen = generation_.load(std::memory_order_relaxed);
                std::thread worker([this, slot, seen] { work(slot, seen); });
                ++num_workers_;
#ifndef __APPLE__  // which has no such clocks, and whose torch has no OpenMP team that is found
                clockid_t clock;
                if (pthread_getcpuclockid(worker.native_handle(), &clock) == 0) clocks_.push_back(clock);
#endif
                worker.detach();
            }
        } catch (const std::exception&) {  // no thread, or no memory for one: the next call tries again
        }
    }

    // The processor time of all workers.
    double worker_seconds() const {
        double total = 0.0;
        for (const clockid_t clock : clocks_) total += clock_seconds(clock);
        return total;
    }

    void take(int slot) {
        for (int64_t index; (index = next_.fetch_add(1, std::memory_order_relaxed)) < count_;) task_(context_, index, slot);
    }

    void work(int slot, uint64_t seen) {
        for (;;) {
            for (int spin = 0; spin < most_spins() && generation_.load(std::memory_order_acquire) == seen; ++spin) pause();
            bool helps;
            {
                std::unique_lock<std::mutex> lock(mutex_);
                wake_.wait(lock, [&] { return generation_.load(std::memory_order_relaxed) != seen; });
                seen = generation_.load(std::memory_order_relaxed);
                helps = slot <= helpers_;
                if (helps) working_.fetch_add(1, std::memory_order_relaxed);
            }
            if (!helps) continue;
            take(slot);
            if (working_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
                std::lock_guard<std::mutex> lock(mutex_);
                done_.notify_one();
            }
        }
    }

    int most_spins() const {
        const bool work_is_about_to_come = stand_bys.load(std::memory_order_relaxed) != 0;
        return work_is_about_to_come && leaves_a_core_.load(std::memory_order_relaxed) ? kStandBySpins : kSpins;
    }

    void wait_for_helpers() {
        for (int spin = 0; spin < kSpins; ++spin) {
            if (working_.load(std::memory_order_acquire) == 0) return;
            pause();
        }
        std::unique_lock<std::mutex> lock(mutex_);
        done_.wait(lock, [&] { return working_.load(std::memory_order_acquire) == 0; });
    }

    std::mutex owner_;  // held by the caller that uses the workers
    std::mutex mutex_;  // guards the job below
    std::condition_variable wake_, done_;
    int num_workers_ = 0;
    std::vector<clockid_t> clocks_;  // clocks of the workers' processor time
    OmpActivityProbe omp_activity_;  // guarded by owner_
    std::atomic<uint64_t> generation_{0};
    std::atomic<int64_t> next_{0};
    std::atomic<int> working_{0};  // helpers that have begun and not finished
    std::atomic<bool> leaves_a_core_{false};
    const int num_cores_ = static_cast<int>(std::thread::hardware_concurrency());
    int helpers_ = 0;  // workers that may begin
    int64_t count_ = 0;
    Task task_ = nullptr;
    void* context_ = nullptr;
};

// The pool is never destroyed: workers may still wait in it when the process ends. A forked child inherits no threads, and
// starts a new pool. It is null if there is no memory for it; callers then work alone.
Pool* pool = nullptr;

void renew_pool() {
    stand_bys.store(0, std::memory_order_relaxed);
    pool = new (std::nothrow) Pool;
}

// The pool is created when the library is loaded, so that a fork never finds it half initialized.
[[maybe_unused]] const bool started = [] {
    if (pthread_atfork(nullptr, nullptr, renew_pool) == 0) renew_pool();
    return true;
}();

}  // namespace

StandBy::StandBy() { stand_bys.fetch_add(1, std::memory_order_relaxed); }
StandBy::~StandBy() { stand_bys.fetch_sub(1, std::memory_order_relaxed); }

SignalMask::SignalMask() {
    sigset_t blocked;
    sigfillset(&blocked);
    for (int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGSYS, SIGPROF}) sigdelset(&blocked, signal);
    pthread_sigmask(SIG_BLOCK, &blocked, &before_);
}

SignalMask::~SignalMask() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

void wait_for(const int32_t* number, int32_t wanted) {
    for (int spin = 0; __atomic_load_n(number, __ATOMIC_ACQUIRE) != wanted; ++spin)
        spin < kSpins ? pause() : std::this_thread::yield();
}

void parallel_for(int64_t count, int num_threads, Task task, void* context) {
    if (count < num_threads) num_threads = static_cast<int>(count);
    if (num_threads <= 1 || pool == nullptr) return Pool::run_alone(count, task, context);
    pool->run(count, num_threads, task, context);
}

}  // namespace fastattention
