#include "common/work_queue.hpp"

#include <chrono>

#include "common/omp_team.hpp"
#include "common/thread_pool.hpp"

namespace fastattention {
namespace {

// How long the queue polls for a job to become ready before it sleeps between polls: longer than a GPU takes from one layer
// in host memory to the next.
constexpr std::chrono::milliseconds kEager{20};
constexpr std::chrono::microseconds kRest{100};
constexpr int kLooks = 64;  // polls between readings of the clock, after which other threads may run

}  // namespace

WorkQueue::WorkQueue(const uint32_t* ready, uint32_t* done) : ready_(ready), done_(done) {
    const SignalBlock signals_blocked;
    thread_ = std::thread([this] { work(); });
}

WorkQueue::~WorkQueue() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        ends_ = true;
    }
    pushed_.notify_one();
    thread_.join();
    finish(newest_);
}

void WorkQueue::push(uint32_t number, Function function, void* argument) {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        jobs_.push_back({number, function, argument});
        newest_ = number;
    }
    pushed_.notify_one();
}

uint32_t WorkQueue::newest() {
    std::lock_guard<std::mutex> lock(mutex_);
    return newest_;
}

void WorkQueue::work() {
    decline_omp_team();  // our workers stand by, and OpenMP would start another team for this thread
    for (;;) {
        Job job;
        {
            std::unique_lock<std::mutex> lock(mutex_);
            pushed_.wait(lock, [this] { return ends_ || !jobs_.empty(); });
            if (ends_) return;
            job = jobs_.front();
            jobs_.pop_front();
        }
        if (!wait_until_ready(job.number)) return;
        job.function(job.argument);
        finish(job.number);
    }
}

// Returns true when the job is ready, false when the queue ends first.
bool WorkQueue::wait_until_ready(uint32_t number) const {
    const StandBy stand_by;
    const auto start = std::chrono::steady_clock::now();
    while (!ends_) {
        for (int look = 0; look < kLooks; ++look) {
            if (static_cast<int32_t>(__atomic_load_n(ready_, __ATOMIC_ACQUIRE) - number) >= 0) return true;
            pause();
        }
        if (std::chrono::steady_clock::now() - start < kEager) {
            std::this_thread::yield();
        } else {
            std::this_thread::sleep_for(kRest);
        }
    }
    return false;
}

}  // namespace fastattention
