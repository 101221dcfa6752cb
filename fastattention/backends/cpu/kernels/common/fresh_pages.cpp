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

#ifdef __linux__
#ifndef MADV_POPULATE_WRITE
constexpr int MADV_POPULATE_WRITE = 23;  // since Linux 5.14; headers may be older
#endif
void populate(void* memory, size_t bytes) { madvise(memory, bytes, MADV_POPULATE_WRITE); }
#else
void populate(void*, size_t) {}
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
        const uintptr_t from = std::max<uintptr_t>(begin, (first + part) * kPartBytes);
        const uintptr_t to = std::min<uintptr_t>(end, (first + part + 1) * kPartBytes);
        populate(reinterpret_cast<void*>(from), to - from);  // only advice: failure costs only speed
    });
}

}  // namespace fastattention
