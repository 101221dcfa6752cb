// Exercises the thread pool as calls do, with its own threads and OpenMP's, and work queues that use it. It is meant to run
// under the thread sanitizer. Exits with 1 if an index was not run exactly once, two threads used a slot at once, a job saw
// another job's input, or an awake OpenMP team did nothing.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <thread>
#include <vector>

#include "common/omp_team.hpp"
#include "common/thread_pool.hpp"
#include "common/work_queue.hpp"

namespace {

std::atomic<int> failures{0};

void run_rounds(int rounds, int64_t count, int num_threads) {
    for (int round = 0; round < rounds; ++round) {
        std::vector<int> runs(count, 0);                   // not atomic: the pool must order accesses to it
        std::vector<std::atomic<int>> held(num_threads);
        fastattention::parallel_for(count, num_threads, [&](int64_t index, int slot) {
            if (slot < 0 || slot >= num_threads || held[slot].fetch_add(1) != 0) ++failures;
            ++runs[index];
            held[slot].fetch_sub(1);
        });
        for (int run : runs)
            if (run != 1) ++failures;
    }
}

// A fake OpenMP with a team of five threads that all begin at once.
std::atomic<int> teams{0};

void run_team(void (*function)(void*), void* data, unsigned, unsigned) {
    ++teams;
    std::atomic<int> here{0};
    const auto member = [&] {
        for (++here; here < 5;) fastattention::pause();
        function(data);
    };
    std::vector<std::thread> team;
    for (int i = 0; i < 4; ++i) team.emplace_back(member);
    member();
    for (std::thread& one : team) one.join();
}

// The size of the team. It is 0 when first asked for, so that no thread needs to be busy for the team to count as awake.
std::atomic<int> members{0};

void run_on_team() {
    for (int num_threads : {4, 2, 5})
        for (int64_t count : {2, 7, 5000}) {
            fastattention::set_omp_team({run_team, [] { return members.exchange(5); }});  // not one that was held up
            members = 0;
            const int before = teams;
            std::this_thread::sleep_for(std::chrono::milliseconds(30));  // until it is time to look
            run_rounds(3, count, num_threads);
            if (teams == before) ++failures;
        }
    fastattention::set_omp_team({});
}

// Input and result are not atomic: only `ready` and `done` order accesses to them.
struct StressJob {
    int input = 0, result = 0;

    static void run(void* argument) {
        StressJob& job = *static_cast<StressJob*>(argument);
        std::atomic<int> sum{0};
        fastattention::parallel_for(8, 4, [&](int64_t, int) { sum += job.input; });
        job.result = sum;
    }
};

void run_queue(int jobs) {
    uint32_t ready = 0, done = 0;
    std::vector<StressJob> work(jobs);
    fastattention::WorkQueue queue(&ready, &done);
    for (int i = 0; i < jobs; ++i) {
        queue.push(i + 1, StressJob::run, &work[i]);
        work[i].input = i;
        __atomic_store_n(&ready, i + 1, __ATOMIC_RELEASE);
        if (i % 3 != 0) continue;  // other jobs are pushed ahead
        while (__atomic_load_n(&done, __ATOMIC_ACQUIRE) != static_cast<uint32_t>(i + 1)) fastattention::pause();
        if (work[i].result != 8 * i) ++failures;
    }
    queue.push(jobs + 1, StressJob::run, &work[0]);  // never ready
}

}  // namespace

int main() {
    // Calls with more and fewer threads in turn, and with counts of 0, below and above the number of threads.
    for (int num_threads : {1, 2, 4, 3, 8, 2})
        for (int64_t count : {0, 1, 2, 7, 500}) run_rounds(50, count, num_threads);
    run_on_team();
    // Several callers at once: one gets the workers, the others work alone.
    std::vector<std::thread> callers;
    for (int i = 0; i < 3; ++i) callers.emplace_back([] { run_rounds(200, 64, 4); });
    for (std::thread& caller : callers) caller.join();
    std::vector<std::thread> queues;
    for (int i = 0; i < 2; ++i) queues.emplace_back([] { run_queue(200); });
    for (std::thread& queue : queues) queue.join();
    if (failures != 0) std::printf("%d failures\n", failures.load());
    return failures == 0 ? 0 : 1;
}
