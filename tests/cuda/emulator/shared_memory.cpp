#include "shared_memory.hpp"

#include <algorithm>
#include <cstring>
#include <deque>

namespace emulator {

namespace {

constexpr int kSeveralThreads = -1;  // several threads of one warp
constexpr int kSeveralWarps = -2;
constexpr int kBulkCopy = -4;
constexpr int kAdders = -5;  // threads that add to a word, in any order

// Who accessed a word, and when. Epochs of a warp order the threads of the warp, epochs of the CTA all threads. For a bulk
// copy, warp_epoch and warp are the phase and the number of its counter, and epoch is when the first thread waited for it.
struct Event {
    std::uint32_t epoch, warp_epoch;
    std::int32_t thread;  // or one of the constants above
    std::int32_t warp;
};

struct Word {
    Event written, read;
    std::int32_t copied_by;  // the thread whose asynchronous copy to this word is in flight, or -1
};

struct BulkCopy {
    std::uint32_t to;
    const void* from;
    std::uint32_t bytes;
};

// A counter of bulk copies, and its current phase.
struct Counter {
    std::uint32_t address;
    std::int32_t number;  // its index among counters
    std::vector<std::uint32_t> seen;  // by thread: the number of phases that it knows to have ended
    std::uint32_t phases = 0;         // phases that have ended
    bool is_expected = false;
    std::uint32_t expected = 0, requested = 0;  // bytes
    std::vector<BulkCopy> copies;
    std::vector<Thread*> waiting;

    bool has_all() const { return is_expected && requested == expected; }
};

std::vector<unsigned char> memory;
std::vector<Word> words;
std::deque<Counter> counters;
std::size_t threads;

Event event_of(const Thread& thread) { return {epoch, thread.warp->epoch, thread.index, thread.index / kLanes}; }

// Whether a barrier separates an event from what the thread does now, or the event is the thread's own.
bool is_before(const Event& event, const Event& now) {
    if (event.epoch < now.epoch || event.thread == now.thread) return true;
    if (event.thread == kBulkCopy) return counters[event.warp].seen[now.thread] > event.warp_epoch;
    return event.thread != kSeveralWarps && event.warp == now.warp && event.warp_epoch < now.warp_epoch;
}

// Adds a reader to the readers since the last barriers.
void add_reader(Event& read, const Event& now) {
    if (read.epoch == now.epoch && read.thread == kSeveralWarps) return;
    if (read.epoch < now.epoch || (read.warp == now.warp && read.warp_epoch < now.warp_epoch)) {
        read = now;
    } else if (read.warp != now.warp) {
        read.thread = kSeveralWarps;
    } else if (read.thread != now.thread) {
        read.thread = kSeveralThreads;
    }
}

Word* checked(const Thread& thread, std::uint32_t address, std::uint32_t bytes, std::uint32_t alignment, const char* does) {
    if (address % alignment != 0)
        fail(thread, "%s %u bytes of shared memory at %u, which is not a multiple of %u", does, bytes, address, alignment);
    if (address < kSharedBase || address - kSharedBase + bytes > memory.size())
        fail(thread, "%s %u bytes of shared memory at %u, outside of %u ... %u", does, bytes, address, kSharedBase,
             kSharedBase + static_cast<std::uint32_t>(memory.size()) - 1);
    return &words[(address - kSharedBase) / 4];
}

void check_not_copied(const Thread& thread, const Word& word, std::uint32_t address, const char* does) {
    if (word.copied_by >= 0)
        fail(thread, "%s shared memory at %u under an asynchronous copy that thread %d has not waited for", does, address,
             word.copied_by);
}

// The last write of the word must have been before the last barrier.
void check_written_before(const Thread& thread, const Event& written, const Event& now, std::uint32_t address,
                          const char* does) {
    if (is_before(written, now)) return;
    if (written.thread == kBulkCopy)
        fail(thread, "%s shared memory at %u, where it has not waited for a bulk copy", does, address);
    if (written.thread == kAdders)
        fail(thread, "%s shared memory at %u, to which threads have added since their last barrier", does, address);
    fail(thread, "%s shared memory at %u, which thread %d wrote since their last barrier", does, address, written.thread);
}

// No other thread may have read the word since the last barrier.
void check_read_before(const Thread& thread, const Word& word, const Event& now, std::uint32_t address) {
    if (is_before(word.read, now)) return;
    if (word.read.thread >= 0)
        fail(thread, "writes shared memory at %u, which thread %d read since their last barrier", address, word.read.thread);
    fail(thread, "writes shared memory at %u, which several threads read since their last barrier", address);
}

// No other thread may have accessed the word since the last barrier.
void check_write(const Thread& thread, const Word& word, const Event& now, std::uint32_t address) {
    check_not_copied(thread, word, address, "writes");
    check_written_before(thread, word.written, now, address, "writes");
    check_read_before(thread, word, now, address);
}

// The counter at an address. Fails if the thread must not use it yet.
Counter& counter_at(Thread& thread, std::uint32_t address) {
    std::uint32_t unused[2];
    read_shared(thread, address, unused, sizeof unused);
    for (Counter& counter : counters)
        if (counter.address == address) return counter;
    fail(thread, "uses shared memory at %u as a counter of bulk copies, which it is not", address);
}

// Ends the current phase: carries out its copies and resumes the threads that wait for them.
void end_phase(Counter& counter) {
    for (const BulkCopy& copy : counter.copies) {
        Word* word = &words[(copy.to - kSharedBase) / 4];
        for (std::uint32_t i = 0; i < copy.bytes; i += 4, ++word) {
            word->copied_by = -1;
            word->written = {epoch, counter.phases, kBulkCopy, counter.number};
        }
        std::memcpy(&memory[copy.to - kSharedBase], copy.from, copy.bytes);
    }
    ++counter.phases;
    counter.is_expected = false;
    counter.expected = counter.requested = 0;
    counter.copies.clear();
    for (Thread* thread : counter.waiting) resume(*thread);
    counter.waiting.clear();
}

}  // namespace

void begin_shared_memory(std::uint32_t bytes, std::size_t num_threads) {
    threads = num_threads;
    memory.resize(bytes);
    words.resize(bytes / 4, Word{{0, 0, -3, -1}, {0, 0, -3, -1}, -1});
}

void read_shared(Thread& thread, std::uint32_t address, void* to, std::uint32_t bytes) {
    Word* word = checked(thread, address, bytes, bytes, "reads");
    const Event now = event_of(thread);
    for (std::uint32_t i = 0; i < bytes; i += 4, ++word) {
        check_not_copied(thread, *word, address + i, "reads");
        if (word->written.epoch < first_epoch) fail(thread, "reads shared memory at %u, which nobody wrote", address + i);
        check_written_before(thread, word->written, now, address + i, "reads");
        add_reader(word->read, now);
    }
    std::memcpy(to, &memory[address - kSharedBase], bytes);
}

void write_shared(Thread& thread, std::uint32_t address, const void* from, std::uint32_t bytes) {
    Word* word = checked(thread, address, bytes, bytes, "writes");
    const Event now = event_of(thread);
    for (std::uint32_t i = 0; i < bytes; i += 4, ++word) {
        check_write(thread, *word, now, address + i);
        word->written = now;
    }
    std::memcpy(&memory[address - kSharedBase], from, bytes);
}

void add_shared(Thread& thread, std::uint32_t address, std::int32_t x) {
    Word* word = checked(thread, address, sizeof x, sizeof x, "adds to");
    const Event now = event_of(thread);
    check_not_copied(thread, *word, address, "adds to");
    if (word->written.epoch < first_epoch) fail(thread, "adds to shared memory at %u, which nobody wrote", address);
    if (word->written.thread != kAdders) check_written_before(thread, word->written, now, address, "adds to");
    check_read_before(thread, *word, now, address);
    word->written = {now.epoch, now.warp_epoch, kAdders, kAdders};
    std::int32_t value;
    std::memcpy(&value, &memory[address - kSharedBase], sizeof value);
    value += x;
    std::memcpy(&memory[address - kSharedBase], &value, sizeof value);
}

void start_copy(Thread& thread, std::uint32_t to, const void* from, std::uint32_t bytes) {
    Word* word = checked(thread, to, bytes, bytes, "copies");
    const Event now = event_of(thread);
    for (std::uint32_t i = 0; i < bytes; i += 4, ++word) {
        check_write(thread, *word, now, to + i);
        word->copied_by = thread.index;
    }
    thread.copies.push_back({to, from, bytes, thread.num_groups});
}

void wait_for_copies(Thread& thread, int pending) {
    const int first_pending = thread.num_groups - pending;
    const auto finished = [&](const PendingCopy& copy) {
        if (copy.group >= first_pending) return false;
        Word* word = &words[(copy.to - kSharedBase) / 4];
        for (std::uint32_t i = 0; i < copy.bytes; i += 4, ++word) {
            word->copied_by = -1;
            word->written = event_of(thread);
        }
        unsigned char* to = &memory[copy.to - kSharedBase];
        if (copy.from != nullptr) {
            std::memcpy(to, copy.from, copy.bytes);
        } else {
            std::memset(to, 0, copy.bytes);
        }
        return true;
    };
    thread.copies.erase(std::remove_if(thread.copies.begin(), thread.copies.end(), finished), thread.copies.end());
}

void abandon_copies(Thread& thread) {
    for (const PendingCopy& copy : thread.copies)
        for (std::uint32_t i = 0; i < copy.bytes / 4; ++i) words[(copy.to - kSharedBase) / 4 + i].copied_by = -1;
    thread.copies.clear();
}

void begin_counter(Thread& thread, std::uint32_t counter) {
    const std::uint32_t nothing[2] = {};
    write_shared(thread, counter, nothing, sizeof nothing);
    for (const Counter& other : counters)
        if (other.address == counter) fail(thread, "begins the counter at %u, which has begun", counter);
    counters.push_back({counter, static_cast<std::int32_t>(counters.size()), std::vector<std::uint32_t>(threads)});
}

void expect_bytes(Thread& thread, std::uint32_t counter, std::uint32_t bytes) {
    Counter& here = counter_at(thread, counter);
    if (here.is_expected)
        fail(thread, "expects bytes at the counter at %u, whose phase before nobody has waited for", counter);
    here.is_expected = true;
    here.expected = bytes;
}

void start_bulk_copy(Thread& thread, std::uint32_t to, const void* from, std::uint32_t bytes, std::uint32_t counter) {
    if (bytes == 0 || bytes % 16 != 0) fail(thread, "copies %u bytes, which is not a multiple of 16", bytes);
    check_bulk_fence(thread);
    check_global(from, bytes, 16, "copies", true);
    Counter& here = counter_at(thread, counter);
    Word* word = checked(thread, to, bytes, 16, "copies");
    const Event now = event_of(thread);
    for (std::uint32_t i = 0; i < bytes; i += 4, ++word) {
        check_write(thread, *word, now, to + i);
        word->copied_by = thread.index;
    }
    here.requested += bytes;
    here.copies.push_back({to, from, bytes});
}

void wait_for_bytes(Thread& thread, std::uint32_t counter, std::uint32_t phase) {
    if (phase > 1) fail(thread, "waits for a phase by %u, which is not a bit", phase);
    Counter& here = counter_at(thread, counter);
    const bool has_ended = (here.phases & 1) != phase;
    const std::uint32_t phases = here.phases + !has_ended;
    if (!has_ended && here.has_all()) {
        end_phase(here);
    } else if (!has_ended) {
        here.waiting.push_back(&thread);
        pause();
    }
    here.seen[thread.index] = phases;
}

void finish_bulk_copies(const Thread& thread) {
    const Counter* stuck = nullptr;
    for (Counter& counter : counters) {
        if (counter.waiting.empty()) continue;
        if (counter.has_all()) return end_phase(counter);
        stuck = &counter;
    }
    if (stuck == nullptr) fail(thread, "is the last that stopped: no thread can go on");
    if (!stuck->is_expected)
        fail(*stuck->waiting[0], "waits for bytes that nobody expects, at the counter at %u", stuck->address);
    fail(*stuck->waiting[0], "waits for %u bytes at the counter at %u, of which %u were asked for", stuck->expected,
         stuck->address, stuck->requested);
}

void check_no_bulk_copies(const Thread& thread) {
    for (const Counter& counter : counters)
        if (counter.is_expected || !counter.copies.empty())
            fail(thread, "returned as the last, and nobody has waited for the counter at %u", counter.address);
}

void abandon_bulk_copies() {
    for (const Counter& counter : counters)
        for (const BulkCopy& copy : counter.copies)
            for (std::uint32_t i = 0; i < copy.bytes / 4; ++i) words[(copy.to - kSharedBase) / 4 + i].copied_by = -1;
    counters.clear();
}

}  // namespace emulator
