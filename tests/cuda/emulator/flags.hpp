// Flags in memory that is shared with other processes, which stand for other GPUs.
//
// The emulator finds a flag that a thread stores without a system_fence since the last barrier of its CTA, so that other
// threads' earlier writes might not be visible. It finds a thread that has loaded a flag and comes to a collective, or
// accesses global memory, without a system_fence. It finds a thread that starts a bulk copy without a bulk_fence since its
// CTA last loaded a flag. It does not find accesses to memory before a flag allows them.
#pragma once

#include <cstdint>

#pragma GCC visibility push(hidden)

namespace emulator {

struct Thread;

// The last flag that a thread has loaded, and its last fences.
struct Fences {
    const std::int32_t* loaded;   // the flag it loaded without a system_fence since, or null
    std::uint32_t system_epoch;   // the CTA's epoch at the last system_fence
    std::uint64_t bulk_loads;     // loads of flags by the CTA up to the last bulk_fence
};

void begin_flags();

// A thread that loads the same flag again yields to other threads and other processes.
std::int32_t load_flag(Thread& thread, const std::int32_t* flag);
void store_flag(Thread& thread, std::int32_t* flag, std::int32_t x);
void system_fence(Thread& thread);
void bulk_fence(Thread& thread);

// Fail if a thread lacks a fence: before what it `does`, and before it starts a bulk copy.
void check_fence(const Thread& thread, const char* does);
void check_bulk_fence(const Thread& thread);

std::int64_t nanoseconds();

}  // namespace emulator

#pragma GCC visibility pop
