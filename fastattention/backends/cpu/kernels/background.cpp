#include "background.hpp"

#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace fastattention {
namespace {

struct Job {
    int64_t count;
    int num_threads;
    Task task;
    void* context;
};

class Background {
public:
    void start(const Job& job) {
        stop();
        std::lock_guard<std::mutex> lock(mutex_);
        if (!started_) std::thread([this] { serve(); }).detach();
        started_ = true;
        job_ = job;
        busy_ = true;
        stopped_.store(false, std::memory_order_relaxed);
        wake_.notify_one();
    }

    void stop() {
        stopped_.store(true, std::memory_order_relaxed);
        std::unique_lock<std::mutex> lock(mutex_);
        idle_.wait(lock, [&] { return !busy_; });
    }

private:
    void serve() {
        for (;;) {
            Job job;
            {
                std::unique_lock<std::mutex> lock(mutex_);
                wake_.wait(lock, [&] { return busy_; });
                job = job_;
            }
            std::atomic<int64_t> next{0};
            parallel_for(job.num_threads, job.num_threads, [&](int64_t, int slot) {
                while (!stopped_.load(std::memory_order_relaxed)) {
                    const int64_t index = next.fetch_add(1, std::memory_order_relaxed);
                    if (index >= job.count) break;
                    job.task(job.context, index, slot);
                }
            });
            std::lock_guard<std::mutex> lock(mutex_);
            busy_ = false;
            idle_.notify_all();
        }
    }

    std::mutex mutex_;  // guards what follows
    std::condition_variable wake_, idle_;
    Job job_{};
    bool started_ = false;
    bool busy_ = false;  // from the start of a job to its end
    std::atomic<bool> stopped_{false};
};

// As the pool: never destroyed, and a forked child starts a new one.
Background* background = nullptr;

void renew_background() { background = new Background; }

Background& the_background() {
    static const bool started = [] {
        renew_background();
        pthread_atfork(nullptr, nullptr, renew_background);
        return true;
    }();
    (void)started;
    return *background;
}

}  // namespace

void start_background(int64_t count, int num_threads, Task task, void* context) {
    the_background().start({count, num_threads, task, context});
}

void stop_background() { the_background().stop(); }

}  // namespace fastattention
