#include "shared_memory.hpp"

#include <algorithm>
#include <cstring>

namespace emulator {

namespace {

constexpr int kSeveralThreads = -1;  // of one warp
constexpr int kSeveralWarps = -2;

// Who accessed a word, and when. Epochs of a warp order its own threads, those of the CTA all of them.
struct Event {
    std::uint32_t epoch, warp_epoch;
    std::int32_t thread;  // or kSeveral...
    std::int32_t warp;
};

struct Word {
    Event written, read;
    std::int32_t copied_by;  // the thread whose asynchronous copy is under way, or -1
};

std::vector<unsigned char> memory;
std::vector<Word> words;

Event event_of(const Thread& thread) {
    return {epoch, thread.warp->epoch, thread.index, thread.index / kLanes};
}

// Whether a barrier lies between an event and what the thread does now, or it was that thread's own.
bool is_before(const Event& event, const Event& now) {
    if (event.epoch < now.epoch || event.thread == now.thread) return true;
    return event.thread != kSeveralWarps && event.warp == now.warp && event.warp_epoch < now.warp_epoch;
}

// Adds a reader to those since the last barriers.
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

Word* checked(const Thread& thread, std::uint32_t address, std::uint32_t bytes, const char* does) {
    if (address % bytes != 0)
        fail(thread, "%s %u bytes of shared memory at %u, which is not a multiple of %u", does, bytes, address, bytes);
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

// Nobody may have accessed the word since the last barrier.
void check_write(const Thread& thread, const Word& word, const Event& now, std::uint32_t address) {
    check_not_copied(thread, word, address, "writes");
    if (!is_before(word.written, now))
        fail(thread, "writes shared memory at %u, which thread %d wrote since their last barrier", address,
             word.written.thread);
    if (is_before(word.read, now)) return;
    if (word.read.thread >= 0)
        fail(thread, "writes shared memory at %u, which thread %d read since their last barrier", address, word.read.thread);
    fail(thread, "writes shared memory at %u, which several threads read since their last barrier", address);
}

}  // namespace

void begin_shared_memory(std::uint32_t bytes) {
    memory.resize(bytes);
    words.resize(bytes / 4, Word{{0, 0, -3, -1}, {0, 0, -3, -1}, -1});
}

void read_shared(Thread& thread, std::uint32_t address, void* to, std::uint32_t bytes) {
    Word* word = checked(thread, address, bytes, "reads");
    const Event now = event_of(thread);
    for (std::uint32_t i = 0; i < bytes; i += 4, ++word) {
        check_not_copied(thread, *word, address + i, "reads");
        if (word->written.epoch < first_epoch) fail(thread, "reads shared memory at %u, which nobody wrote", address + i);
        if (!is_before(word->written, now))
            fail(thread, "reads shared memory at %u, which thread %d wrote since their last barrier", address + i,
                 word->written.thread);
        add_reader(word->read, now);
    }
    std::memcpy(to, &memory[address - kSharedBase], bytes);
}

void write_shared(Thread& thread, std::uint32_t address, const void* from, std::uint32_t bytes) {
    Word* word = checked(thread, address, bytes, "writes");
    const Event now = event_of(thread);
    for (std::uint32_t i = 0; i < bytes; i += 4, ++word) {
        check_write(thread, *word, now, address + i);
        word->written = now;
    }
    std::memcpy(&memory[address - kSharedBase], from, bytes);
}

void start_copy(Thread& thread, std::uint32_t to, const void* from, std::uint32_t bytes) {
    Word* word = checked(thread, to, bytes, "copies");
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

}  // namespace emulator
