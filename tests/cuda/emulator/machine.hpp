// A multiprocessor that runs one CTA at a time, its threads as fibers on one thread of the operating system.
//
// A thread runs until it arrives at a collective of its warp or at a barrier of the CTA. Then the next lane of the warp
// runs. The last lane to arrive does the work for all 32 and goes on; the others follow when it stops at the next
// collective. Warps take turns at barriers. A thread that waits for a bulk copy, or for another process, waits alone.
//
// Errors that the emulator finds, each of which ends the launch with a message that names CTA and thread:
// - lanes of a warp that wait at different collectives, or return while others wait;
// - a barrier that a thread misses: it took part in one, and returned before another (threads that return before the first
//   barrier do not count);
// - shared memory: see shared_memory.hpp;
// - global memory: accesses of 8 and 16 bytes that are not aligned, or not within one of the ranges passed with the launch;
// - flags between processes: see flags.hpp.
// It does not find accesses to global memory through ordinary pointers, races in global memory, or a barrier that threads
// reach in different places of the kernel.
#pragma once

#include <cstdint>
#include <vector>

#include "banks.hpp"
#include "fiber.hpp"
#include "flags.hpp"

#pragma GCC visibility push(hidden)

namespace emulator {

constexpr int kLanes = 32;

// A range of global memory that a kernel may access.
struct Range {
    std::uint64_t address;
    std::int64_t bytes;
};

// The CTAs of a launch; ../emulator.py mirrors it.
struct Grid {
    std::int64_t num_ctas;
    std::uint64_t shuffle;  // 0: CTAs, and warps within each, run in order; otherwise a seed for a random order
};

// The result of a launch; ../emulator.py mirrors it.
struct Report {
    Wavefronts loads, stores, matrices, copies;
    char error[512];  // empty if there was none
};

struct Warp;

// An operation of all lanes of a warp together.
struct Collective {
    const char* name;
    void (*run)(Warp&);  // does the work of all lanes once all have arrived
};

// An asynchronous copy to shared memory that no thread has waited for.
struct PendingCopy {
    std::uint32_t to;
    const void* from;  // null for zeros
    std::uint32_t bytes;
    int group;
};

struct Thread {
    Fiber fiber;
    Warp* warp;
    int index, lane;
    int num_groups;  // groups of asynchronous copies that it has committed
    std::vector<PendingCopy> copies;
    Fences fences;
};

struct Warp {
    Thread* threads;  // its 32 lanes
    std::size_t turn;  // its place in the order in which warps take turns
    int live, arrived;
    std::uint32_t returned, stopped;  // one bit per lane; lanes stop when they arrive, pause or return
    const Collective* at;       // where the arrived lanes wait
    void* operands[kLanes];     // operands of the collective, on the stacks of the lanes
    std::uint32_t epoch;        // advances at each barrier of the warp
    AccessLog accesses;
};

// The running thread.
extern Thread* current;
// The index of the running CTA.
extern std::int64_t cta;
// epoch advances at each barrier of a CTA, and from one CTA to the next; first_epoch is its value when this CTA began.
extern std::uint32_t epoch, first_epoch;

// Ends the launch. The message says what `thread` did, e.g. "reads 0x10, which is ...".
[[noreturn]] void fail(const Thread& thread, const char* format, ...) __attribute__((format(printf, 2, 3)));

// The current thread waits for the other lanes. operands: the collective's operands of this lane.
void arrive(const Collective& at, void* operands);

// The current thread waits for all threads of the CTA that have not returned.
void cta_barrier();

// Does the same, and returns whether x is true for any of them.
bool any_thread(bool x);

// The current thread stops until another one resumes it. When no thread can go on, a bulk copy that a thread waits for ends.
void pause();
void resume(Thread& thread);

// All other threads that can go on take turns with the current one.
void let_others_go_on();

// Checks what the current thread `does` with `bytes` of global memory or, if not `accessed`, with their address alone.
void check_global(const void* address, std::uint32_t bytes, const char* does, bool accessed);
// Does the same for an address that need not be a multiple of the bytes.
void check_global(const void* address, std::uint32_t bytes, std::uint32_t alignment, const char* does, bool accessed);

// Runs `kernel` for each CTA of the grid. Returns false, with a message in the report, if it failed.
bool launch(void (*kernel)(const void* params), const void* params, const Grid& grid, int num_warps,
            std::uint32_t shared_bytes, const Range* ranges, std::int64_t num_ranges, Report& report);

}  // namespace emulator

#pragma GCC visibility pop
