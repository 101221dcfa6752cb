// Exercises the thread pool as calls do; meant to run under the thread sanitizer. Exits with 1 when an index was not run
// exactly once, or a slot was used by two threads at once.
#include <atomic>
#include <cstdio>
#include <thread>
#include <vector>

#include "background.hpp"
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

// Jobs in the background that are stopped early, late or by the next one: nothing of a stopped job runs any more.
void stop_and_start(int rounds) {
    for (int round = 0; round < rounds; ++round) {
        std::vector<int> runs(300, 0);  // plain, and gone when it was stopped
        auto task = [](void* context, int64_t index, int) { ++(*static_cast<std::vector<int>*>(context))[index]; };
        fastattention::start_background(300, 1 + round % 4, task, &runs);
        if (round % 3 == 0) run_rounds(1, 20, 3);
        if (round % 5 == 0) fastattention::start_background(200, 3, task, &runs);
        fastattention::stop_background();
        for (int run : runs)
            if (run > 2) ++failures;
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
    stop_and_start(200);
    if (failures != 0) std::printf("%d failures\n", failures.load());
    return failures == 0 ? 0 : 1;
}
