// Shared memory of the CTA that runs. Every access is checked.
//
// Found: addresses outside of it or not aligned to the size of the access; words that are read before anyone wrote them;
// words under an asynchronous copy that are accessed before the thread that started it waited for it; and races, that is two
// accesses of different threads to a word, one of them a write, without a barrier of the CTA, or of their common warp, in
// between. An asynchronous copy may write at any time between its start and the wait, so it races with accesses before its
// start, and what it wrote is new at the wait.
//
// Bulk copies write at any time before a thread has waited for the phase that counts them. They are carried out as late as
// can be: when the first thread waits and all bytes have been asked for. Threads may access what has come if they have
// waited themselves, or are behind a barrier of the CTA with one that has. Found: counters that nobody began, or that are
// begun twice; a phase that begins before anyone has waited for the one before; waits that never end, because nobody
// expects bytes or not as many are asked for as are expected; sizes and addresses that are no multiples of 16; a CTA that
// ends before its copies do.
//
// A race is found whatever the order in which fibers happen to run, but only between accesses that this launch makes.
#pragma once

#include <cstdint>

#include "machine.hpp"

#pragma GCC visibility push(hidden)

namespace emulator {

// The address of the first byte: not 0, so that 0 is outside.
constexpr std::uint32_t kSharedBase = 1024;

// Empties it for the next CTA.
void begin_shared_memory(std::uint32_t bytes, std::size_t num_threads);

void read_shared(Thread& thread, std::uint32_t address, void* to, std::uint32_t bytes);
void write_shared(Thread& thread, std::uint32_t address, const void* from, std::uint32_t bytes);

// Of 4 or 16 bytes of global memory, or zeros when `from` is null.
void start_copy(Thread& thread, std::uint32_t to, const void* from, std::uint32_t bytes);
// Until at most `pending` of the groups that the thread committed are under way.
void wait_for_copies(Thread& thread, int pending);
// Of a thread that has returned.
void abandon_copies(Thread& thread);

// Bulk copies, and counters of 8 bytes. A thread is told of the phase that it waits for by its lowest bit.
void begin_counter(Thread& thread, std::uint32_t counter);
void expect_bytes(Thread& thread, std::uint32_t counter, std::uint32_t bytes);
void start_bulk_copy(Thread& thread, std::uint32_t to, const void* from, std::uint32_t bytes, std::uint32_t counter);
void wait_for_bytes(Thread& thread, std::uint32_t counter, std::uint32_t phase);
// When no thread can go on, `thread` being the last that did: resumes those that wait for some phase, or fails.
void finish_bulk_copies(const Thread& thread);
// When the last thread returns.
void check_no_bulk_copies(const Thread& thread);
void abandon_bulk_copies();

}  // namespace emulator

#pragma GCC visibility pop
