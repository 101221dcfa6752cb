// Forks while other threads use the thread pool and working memory. Exits with 1 if a child does not finish a job, e.g.
// because it waits for a lock that was held by a thread of its parent.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <thread>
#include <vector>

#include "common/arena.hpp"
#include "common/thread_pool.hpp"

namespace {

bool job() {
    const fastattention::Arena arena(size_t{1} << 16);
    std::atomic<int64_t> sum{0};
    fastattention::parallel_for(10, 3, [&](int64_t index, int) { sum += index; });
    return arena.data() != nullptr && sum == 45;
}

}  // namespace

int main() {
    std::atomic<bool> over{false};
    std::vector<std::thread> busy;
    for (int i = 0; i < 2; ++i)
        busy.emplace_back([&] {
            while (!over) const fastattention::Arena arena(size_t{1} << 16);
        });
    busy.emplace_back([&] {
        while (!over) job();
    });
    int failures = 0;
    for (int i = 0; i < 200 && failures == 0; ++i) {
        const pid_t child = fork();
        if (child == 0) {
            alarm(30);
            _exit(job() ? 0 : 1);
        }
        int status = 1;
        waitpid(child, &status, 0);
        if (status != 0) ++failures;
    }
    over = true;
    for (std::thread& thread : busy) thread.join();
    if (failures != 0) std::printf("a child failed\n");
    return failures == 0 ? 0 : 1;
}
