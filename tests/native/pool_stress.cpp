// Exercises the thread pool as calls do, with threads of its own and OpenMP's, and queues of work that use it; meant to run
// under the thread sanitizer. Exits with 1 when an index was not run exactly once, a slot was used by two threads at once, a
// job saw other input than its own, or an OpenMP team that was awake did nothing.
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
        std::vector<int> runs(count, 0);                   // plain: the pool must order what callers and workers see
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

// A fake OpenMP with a team of five, all of whom begin at once.
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

// How many there are. Asked first by who looks whether as many are at work: none need be.
std::atomic<int> members{0};

void run_on_team() {
    fastattention::set_omp_team({run_team, [] { return members.exchange(5); }});
    for (int num_threads : {4, 2, 5})
        for (int64_t count : {2, 7, 5000}) {
            members = 0;
            const int before = teams;
            std::this_thread::sleep_for(std::chrono::milliseconds(30));  // until it is time to look
            run_rounds(3, count, num_threads);
            if (teams == before) ++failures;
        }
    fastattention::set_omp_team({});
}

// Input and results are plain numbers: what orders them is ready and done alone.
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
        if (i % 3 != 0) continue;  // others are asked for ahead
        while (__atomic_load_n(&done, __ATOMIC_ACQUIRE) != static_cast<uint32_t>(i + 1)) fastattention::pause();
        if (work[i].result != 8 * i) ++failures;
    }
    queue.push(jobs + 1, StressJob::run, &work[0]);  // never ready
}

}  // namespace

int main() {
    // More and fewer threads from call to call, counts below and above them, none at all.
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
