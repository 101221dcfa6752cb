#include "machine.hpp"

#include <cstdarg>
#include <algorithm>
#include <cstdio>
#include <memory>
#include <numeric>
#include <random>

#include "collectives.hpp"
#include "shared_memory.hpp"

namespace emulator {

Thread* current;
std::int64_t cta;
std::uint32_t epoch, first_epoch;

namespace {

// The running launch.
struct Launch {
    void (*kernel)(const void* params);
    const void* params;
    std::vector<Thread> threads;
    std::vector<Warp> warps;
    std::vector<Warp*> turns;          // the warps in the order in which they take turns
    bool votes, outcome;               // of any_thread: votes so far, and the outcome at the last barrier
    int live_warps, waiting_warps;     // warps with threads left, and those whose threads all wait at a barrier
    const Thread* returned_late;       // a thread that returned after the first barrier
    const Range *ranges, *last_range;
    std::int64_t num_ranges;
    Report* report;
    Fiber outside;  // the fiber of launch()
};

Launch* now;

const Collective kCtaBarrier{"cta_barrier", nullptr};

void go_on_with(Thread& thread) {
    Thread& from = *current;
    current = &thread;
    Fiber::switch_stacks(from.fiber, thread.fiber);
}

[[noreturn]] void leave() {
    Fiber::switch_stacks(current->fiber, now->outside);
    __builtin_unreachable();
}

constexpr std::uint32_t kAllLanes = 0xffffffff;

std::uint32_t bit_of(const Thread& thread) { return 1u << thread.lane; }

bool has_returned(const Thread& thread) { return thread.warp->returned & bit_of(thread); }

// The next lane of the warp that can go on. There must be one.
Thread& next_lane(const Thread& thread) {
    const Warp& warp = *thread.warp;
    int lane = thread.lane;
    do lane = (lane + 1) % kLanes;
    while (warp.stopped >> lane & 1);
    return warp.threads[lane];
}

void count_accesses(Warp& warp) {
    Report& report = *now->report;
    warp.accesses.count(report.loads, report.stores, report.copies);
}

// A thread that can go on: of the same warp, else of the next warp that has one, else one that waits for a bulk copy.
Thread& next_thread(const Thread& thread) {
    if (thread.warp->stopped != kAllLanes) return next_lane(thread);
    const std::size_t count = now->warps.size();
    for (;; finish_bulk_copies(thread))
        for (std::size_t i = 1; i <= count; ++i) {
            const Warp& warp = *now->turns[(thread.warp->turn + i) % count];
            if (warp.stopped != kAllLanes) return next_lane(warp.threads[kLanes - 1]);
        }
}

// Lets a warp go on, as all of its lanes have arrived or returned.
void let_go_on(Warp& warp) {
    warp.arrived = 0;
    warp.stopped = warp.returned;
}

// Lets all warps go on, as all wait at a barrier.
void release(const Thread& thread) {
    if (now->returned_late != nullptr)
        fail(thread, "waits at cta_barrier, but thread %d returned after an earlier barrier", now->returned_late->index);
    ++epoch;
    now->outcome = now->votes;
    now->votes = false;
    now->waiting_warps = 0;
    for (Warp& warp : now->warps) let_go_on(warp);
}

void return_from_kernel() {
    Thread& me = *current;
    Warp& warp = *me.warp;
    warp.returned |= bit_of(me);
    warp.stopped |= bit_of(me);
    if (warp.arrived > 0 && warp.at != &kCtaBarrier) fail(me, "returned while lanes of its warp wait at %s", warp.at->name);
    if (epoch > first_epoch) now->returned_late = &me;
    if (--warp.live == 0) {
        count_accesses(warp);
        if (--now->live_warps == 0) {
            check_no_bulk_copies(me);
            leave();
        }
    } else if (warp.arrived == warp.live) {
        ++now->waiting_warps;
    }
    if (now->waiting_warps == now->live_warps) {
        for (const Thread& waiting : now->threads)
            if (!has_returned(waiting)) {
                release(waiting);
                break;
            }
    }
    go_on_with(next_thread(me));
}

void run_thread() {
    now->kernel(now->params);
    return_from_kernel();
}

void prepare_cta(const Stacks& stacks) {
    for (std::size_t i = 0; i < now->turns.size(); ++i) now->turns[i]->turn = i;
    for (Thread& thread : now->threads) {
        thread.num_groups = 0;
        thread.fences = {};
        thread.fiber.prepare(run_thread, stacks.top(thread.index), Stacks::kBytes);
    }
    for (Warp& warp : now->warps) {
        warp.live = kLanes;
        warp.arrived = 0;
        warp.returned = warp.stopped = 0;
    }
    now->live_warps = static_cast<int>(now->warps.size());
    now->waiting_warps = 0;
    now->returned_late = nullptr;
    first_epoch = ++epoch;
}

void prepare_launch(int num_warps) {
    now->threads.resize(num_warps * kLanes);
    now->warps.resize(num_warps);
    for (int i = 0; i < num_warps * kLanes; ++i) {
        Thread& thread = now->threads[i];
        thread.index = i;
        thread.lane = i % kLanes;
        thread.warp = &now->warps[i / kLanes];
    }
    for (int i = 0; i < num_warps; ++i) now->warps[i].threads = &now->threads[i * kLanes];
    for (Warp& warp : now->warps) now->turns.push_back(&warp);
}

}  // namespace

void fail(const Thread& thread, const char* format, ...) {
    char what[400];
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(what, sizeof what, format, arguments);
    va_end(arguments);
    std::snprintf(now->report->error, sizeof now->report->error, "cta %lld, thread %d %s", static_cast<long long>(cta),
                  thread.index, what);
    leave();
}

void arrive(const Collective& at, void* operands) {
    Thread& me = *current;
    Warp& warp = *me.warp;
    check_fence(me, "waits for others");
    if (warp.arrived == 0) warp.at = &at;
    if (warp.at != &at) fail(me, "waits at %s while lanes of its warp wait at %s", at.name, warp.at->name);
    if (warp.live < kLanes && &at != &kCtaBarrier) fail(me, "waits at %s, but lanes of its warp have returned", at.name);
    warp.operands[me.lane] = operands;
    warp.stopped |= bit_of(me);
    if (++warp.arrived < warp.live) return go_on_with(next_thread(me));
    count_accesses(warp);
    if (&at != &kCtaBarrier) {
        let_go_on(warp);
        return at.run(warp);
    }
    if (++now->waiting_warps < now->live_warps) return go_on_with(next_thread(me));
    release(me);
}

void cta_barrier() { arrive(kCtaBarrier, nullptr); }

bool any_thread(bool x) {
    now->votes |= x;
    cta_barrier();
    return now->outcome;
}

void pause() {
    current->warp->stopped |= bit_of(*current);
    go_on_with(next_thread(*current));
}

void resume(Thread& thread) { thread.warp->stopped &= ~bit_of(thread); }

void let_others_go_on() {
    const std::size_t count = now->threads.size();
    for (std::size_t i = 1; i < count; ++i) {
        Thread& other = now->threads[(static_cast<std::size_t>(current->index) + i) % count];
        if (!(other.warp->stopped & bit_of(other))) return go_on_with(other);
    }
}

void check_global(const void* address, std::uint32_t bytes, const char* does, bool accessed) {
    check_global(address, bytes, bytes, does, accessed);
}

void check_global(const void* address, std::uint32_t bytes, std::uint32_t alignment, const char* does, bool accessed) {
    const auto from = reinterpret_cast<std::uintptr_t>(address);
    if (from % alignment != 0)
        fail(*current, "%s %u bytes of global memory at %p, which is not a multiple of %u", does, bytes, address, alignment);
    if (accessed) check_fence(*current, does);
    const auto contains = [&](const Range& range) {
        return from >= range.address && from + bytes <= range.address + static_cast<std::uint64_t>(range.bytes);
    };
    if (!accessed || now->num_ranges == 0 || contains(*now->last_range)) return;
    for (std::int64_t i = 0; i < now->num_ranges; ++i)
        if (contains(now->ranges[i])) {
            now->last_range = &now->ranges[i];
            return;
        }
    fail(*current, "%s %u bytes of global memory at %p, which is in none of the ranges given", does, bytes, address);
}

bool launch(void (*kernel)(const void* params), const void* params, const Grid& grid, int num_warps,
            std::uint32_t shared_bytes, const Range* ranges, std::int64_t num_ranges, Report& report) {
    const auto here = std::make_unique<Launch>();
    now = here.get();
    *now = Launch{kernel, params, {}, {}, {}, false, false, 0, 0, nullptr, ranges, ranges, num_ranges, &report, {}};
    report = {};
    matrix_wavefronts = {};
    prepare_launch(num_warps);
    const Stacks stacks(num_warps * kLanes);
    std::vector<std::int64_t> ctas(static_cast<std::size_t>(grid.num_ctas));
    std::iota(ctas.begin(), ctas.end(), 0);
    std::mt19937 random(grid.shuffle);
    if (grid.shuffle != 0) std::shuffle(ctas.begin(), ctas.end(), random);
    for (std::size_t i = 0; i < ctas.size() && report.error[0] == '\0'; ++i) {
        cta = ctas[i];
        if (grid.shuffle != 0) std::shuffle(now->turns.begin(), now->turns.end(), random);
        prepare_cta(stacks);
        begin_shared_memory(shared_bytes, now->threads.size());
        begin_flags();
        current = now->turns[0]->threads;
        Fiber::switch_stacks(now->outside, current->fiber);
        for (Thread& thread : now->threads) abandon_copies(thread);
        abandon_bulk_copies();
    }
    report.matrices = matrix_wavefronts;
    return report.error[0] == '\0';
}

}  // namespace emulator
