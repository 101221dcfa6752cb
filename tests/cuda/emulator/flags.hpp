// Flags in memory that other processes read and write, which are other GPUs.
//
// Found: a flag that a thread stores without a system_fence since the last barrier of its CTA, so that what others wrote
// before it might not be seen; a thread that has loaded a flag and comes to a collective or accesses global memory without a
// system_fence; a thread that starts a bulk copy without a bulk_fence since its CTA last loaded a flag. Not found: memory
// that is accessed before a flag says that it may be.
#pragma once

#include <cstdint>

#pragma GCC visibility push(hidden)

namespace emulator {

struct Thread;

// What a thread knows of flags, and when it made its fences last.
struct Fences {
    const std::int32_t* loaded;   // without a system_fence since, or null
    std::uint32_t system_epoch;   // of the CTA, at the last system_fence
    std::uint64_t bulk_loads;     // flags that the CTA had loaded at the last bulk_fence
};

void begin_flags();

// A thread that loads the same flag again lets others go on, and other processes.
std::int32_t load_flag(Thread& thread, const std::int32_t* flag);
void store_flag(Thread& thread, std::int32_t* flag, std::int32_t x);
void system_fence(Thread& thread);
void bulk_fence(Thread& thread);

// Before a thread does something, by what it has loaded; and before it starts a bulk copy.
void check_fence(const Thread& thread, const char* does);
void check_bulk_fence(const Thread& thread);

std::int64_t nanoseconds();

}  // namespace emulator

#pragma GCC visibility pop
