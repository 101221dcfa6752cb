// Exercises the thread pool as calls do; meant to run under the thread sanitizer. Exits with 1 when an index was not run
// exactly once, or a slot was used by two threads at once.
#include <atomic>
#include <cstdio>
#include <thread>
#include <vector>

#include "thread_pool.hpp"

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

}  // namespace

int main() {
    // More and fewer threads from call to call, counts below and above them, none at all.
    for (int num_threads : {1, 2, 4, 3, 8, 2})
        for (int64_t count : {0, 1, 2, 7, 500}) run_rounds(50, count, num_threads);
    // Several callers at once: one gets the workers, the others work alone.
    std::vector<std::thread> callers;
    for (int i = 0; i < 3; ++i) callers.emplace_back([] { run_rounds(200, 64, 4); });
    for (std::thread& caller : callers) caller.join();
    if (failures != 0) std::printf("%d failures\n", failures.load());
    return failures == 0 ? 0 : 1;
}
