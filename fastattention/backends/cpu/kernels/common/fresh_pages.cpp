#include "common/fresh_pages.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

#include "common/thread_pool.hpp"

namespace fastattention {
namespace {

// Smaller results are in memory that the allocator has used before.
constexpr int64_t kLeastBytes = int64_t{8} << 20;
// What the entries of one page table map. Threads would wait for each other at a smaller part.
constexpr uintptr_t kPartBytes = uintptr_t{2} << 20;

#ifndef MADV_POPULATE_WRITE
constexpr int MADV_POPULATE_WRITE = 23;  // since Linux 5.14; headers may be older
#endif

}  // namespace

void provide_pages(void* memory, int64_t bytes, int num_threads) {
    if (num_threads <= 1 || bytes < kLeastBytes) return;
    const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    const uintptr_t begin = reinterpret_cast<uintptr_t>(memory) / page * page;
    const uintptr_t end = reinterpret_cast<uintptr_t>(memory) + static_cast<uintptr_t>(bytes);
    const uintptr_t first = begin / kPartBytes;
    const auto parts = static_cast<int64_t>((end - 1) / kPartBytes - first + 1);
    parallel_for(parts, num_threads, [&](int64_t part, int) {
        const uintptr_t from = std::max(begin, (first + part) * kPartBytes);
        const uintptr_t to = std::min(end, (first + part + 1) * kPartBytes);
        madvise(reinterpret_cast<void*>(from), to - from, MADV_POPULATE_WRITE);  // only advice: failure costs only speed
    });
}

}  // namespace fastattention
