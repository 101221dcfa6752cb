// A thread that runs jobs in order, each once a counter in memory has reached the job's number. A GPU writes such a counter
// in microseconds, while a host callback takes a tenth of a millisecond.
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

    // Other threads or GPUs set *ready to numbers of jobs, and this thread sets *done, modulo 2^32 and from 0. Both must
    // outlive the queue. Throws std::system_error if the system allows no further thread.
    WorkQueue(const uint32_t* ready, uint32_t* done);
    WorkQueue(const WorkQueue&) = delete;
    WorkQueue& operator=(const WorkQueue&) = delete;

    // Finishes the running job and drops the others; all count as done.
    ~WorkQueue();

    // Queues a job that runs once *ready has reached `number`; then *done becomes `number`. Numbers must grow.
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
    std::mutex mutex_;  // guards the members below
    std::condition_variable pushed_;
    std::deque<Job> jobs_;
    uint32_t newest_ = 0;
    std::atomic<bool> ends_{false};
    std::thread thread_;
};

}  // namespace fastattention
