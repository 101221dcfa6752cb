// A thread that does one job after another, each when a number in memory says that it may: a GPU writes such a number in
// microseconds, where calling the host takes it a tenth of a millisecond.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <thread>

namespace fastattention {

class WorkQueue {
public:
    using Function = void (*)(void* argument);

    // *ready, which others count up, and *done, which this thread does: numbers of jobs, cyclic, 0 at first. Both stay as
    // long as the queue. Throws std::system_error when there can be no further thread.
    WorkQueue(const uint32_t* ready, uint32_t* done);
    WorkQueue(const WorkQueue&) = delete;
    WorkQueue& operator=(const WorkQueue&) = delete;

    // The job under way is finished, others are not begun; all count as done.
    ~WorkQueue();

    // A job to be done after those before it, once *ready has reached `number`, by which *done then counts. Numbers grow.
    void push(uint32_t number, Function function, void* argument);

    // The number of the newest job, 0 when there was none.
    uint32_t newest();

private:
    struct Job {
        uint32_t number;
        Function function;
        void* argument;
    };

    void work();
    bool wait_until_ready(uint32_t number) const;
    void finish(uint32_t number) { __atomic_store_n(done_, number, __ATOMIC_RELEASE); }

    const uint32_t* const ready_;
    uint32_t* const done_;
    std::mutex mutex_;  // guards what follows
    std::condition_variable pushed_;
    std::deque<Job> jobs_;
    uint32_t newest_ = 0;
    std::atomic<bool> ends_{false};
    std::thread thread_;
};

}  // namespace fastattention
