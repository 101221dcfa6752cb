#include "flags.hpp"

#include <sched.h>

#include <atomic>
#include <chrono>

#include "machine.hpp"

namespace emulator {

namespace {

std::uint64_t loads;  // the number of times that this CTA has loaded a flag

}  // namespace

void begin_flags() { loads = 0; }

std::int32_t load_flag(Thread& thread, const std::int32_t* flag) {
    if (flag == thread.fences.loaded) {
        sched_yield();
        let_others_go_on();
    }
    ++loads;
    thread.fences.loaded = flag;
    return __atomic_load_n(flag, __ATOMIC_RELAXED);
}

void store_flag(Thread& thread, std::int32_t* flag, std::int32_t x) {
    check_fence(thread, "stores a flag");
    if (thread.fences.system_epoch != epoch)
        fail(thread, "stores a flag without a system_fence since the last barrier of its CTA");
    __atomic_store_n(flag, x, __ATOMIC_RELAXED);
}

void system_fence(Thread& thread) {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    thread.fences.system_epoch = epoch;
    thread.fences.loaded = nullptr;
}

void bulk_fence(Thread& thread) { thread.fences.bulk_loads = loads; }

void check_fence(const Thread& thread, const char* does) {
    if (thread.fences.loaded != nullptr) fail(thread, "%s without a system_fence since it loaded a flag", does);
}

void check_bulk_fence(const Thread& thread) {
    if (thread.fences.bulk_loads != loads)
        fail(thread, "starts a bulk copy without a bulk_fence since its CTA loaded a flag");
}

std::int64_t nanoseconds() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace emulator
