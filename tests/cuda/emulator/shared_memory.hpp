// Shared memory of the running CTA. Every access is checked.
//
// The emulator finds addresses that are outside of it or not aligned to the size of the access, and words that are read
// before they are written. It finds accesses to words under an asynchronous copy before the thread that started it has
// waited for it. It finds races: two accesses to a word by different threads, one of them a write, without a barrier of the
// CTA, or of their common warp, in between. An asynchronous copy may write at any time between its start and the wait. So it
// races with accesses before its start, and its data counts as written at the wait.
//
// Bulk copies may write at any time before a thread has waited for their phase. They are carried out as late as possible:
// when the first thread waits and all bytes have been requested. Threads may access the data if they have waited themselves,
// or after a barrier of the CTA with a thread that has. The emulator finds counters that are used before they begin, or that
// begin twice. It finds a phase that begins before a thread has waited for the previous one, and a CTA that ends before its
// copies do. It finds waits that never end, because no bytes are announced or fewer are requested than announced. It also
// finds sizes and addresses that are not multiples of 16.
//
// A race is found in whatever order fibers run, but only between accesses that this launch makes.
#pragma once

#include <cstdint>

#include "machine.hpp"

#pragma GCC visibility push(hidden)

namespace emulator {

// The address of the first byte. It is not 0, so that 0 is outside.
constexpr std::uint32_t kSharedBase = 1024;

// Empties shared memory for the next CTA.
void begin_shared_memory(std::uint32_t bytes, std::size_t num_threads);

void read_shared(Thread& thread, std::uint32_t address, void* to, std::uint32_t bytes);
void write_shared(Thread& thread, std::uint32_t address, const void* from, std::uint32_t bytes);
// Adds to a word as one access. Threads may add to a word without a barrier in between, but nothing else.
void add_shared(Thread& thread, std::uint32_t address, std::int32_t x);

// Starts to copy 4 or 16 bytes of global memory, or zeros when `from` is null.
void start_copy(Thread& thread, std::uint32_t to, const void* from, std::uint32_t bytes);
// Waits until at most `pending` of the groups that the thread committed are in flight.
void wait_for_copies(Thread& thread, int pending);
// Drops the copies of a thread that has returned.
void abandon_copies(Thread& thread);

// Bulk copies, and their counters of 8 bytes. phase: the lowest bit of the phase to wait for.
void begin_counter(Thread& thread, std::uint32_t counter);
void expect_bytes(Thread& thread, std::uint32_t counter, std::uint32_t bytes);
void start_bulk_copy(Thread& thread, std::uint32_t to, const void* from, std::uint32_t bytes, std::uint32_t counter);
void wait_for_bytes(Thread& thread, std::uint32_t counter, std::uint32_t phase);
// Called when no thread can go on. Resumes the threads that wait for some phase, or fails. thread: the last one that ran.
void finish_bulk_copies(const Thread& thread);
// Called when the last thread returns.
void check_no_bulk_copies(const Thread& thread);
void abandon_bulk_copies();

}  // namespace emulator

#pragma GCC visibility pop
