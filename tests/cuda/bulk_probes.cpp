// Small kernels with bulk copies and flags: some do one thing right, some do one thing wrong. test_emulator_bulk.py names
// them.
#include "probes.hpp"

namespace {

constexpr uint32_t kCounter = emulator::kSharedBase + kSharedBytes - 8;
constexpr uint32_t kPlace = emulator::kSharedBase;

// Thread `first` begins the counter before the others go on.
void begin(const Arguments& p) {
    if (thread_index() == p.first) bulk_begin(kCounter);
    cta_barrier();
}

// Thread `first` copies `bytes` from `in` and announces `expected` of them.
void start(const Arguments& p, uint32_t bytes = 16, uint32_t expected = 16) {
    if (thread_index() != p.first) return;
    bulk_expect(kCounter, expected);
    bulk_copy(kPlace, p.in, bytes, kCounter);
}

// --- correct code ---

// Five phases, each of two copies to the same place; out: what each thread reads in each phase.
void phases(const Arguments& p) {
    begin(p);
    for (int i = 0; i < 5; ++i) {
        if (thread_index() == p.first) {
            const char* from = static_cast<const char*>(p.in) + i * 64;
            bulk_expect(kCounter, 64);
            bulk_copy(kPlace, from, 16, kCounter);
            bulk_copy(kPlace + 16, from + 16, 48, kCounter);
        }
        bulk_wait(kCounter, i & 1);
        static_cast<uint32_t*>(p.out)[i * 64 + thread_index()] = load_shared_32(kPlace + thread_index() % 16 * 4);
        cta_barrier();
    }
}
// A phase without bytes.
void nothing(const Arguments& p) {
    begin(p);
    if (thread_index() == p.first) bulk_expect(kCounter, 0);
    bulk_wait(kCounter, 0);
}
// The source of the copy changes until the wait.
void late(const Arguments& p) {
    begin(p);
    uint32_t* words = static_cast<uint32_t*>(p.out);
    if (thread_index() == p.first) {
        words[0] = 7;
        bulk_expect(kCounter, 16);
        bulk_copy(kPlace, words, 16, kCounter);
        words[0] = 9;
    }
    bulk_wait(kCounter, 0);
    cta_barrier();
    words[thread_index()] = load_shared_32(kPlace);
}
// Thread `second` waits for a flag that `first` raises: int 0 of out.
void meet(const Arguments& p) {
    int32_t* flag = static_cast<int32_t*>(p.out);
    if (thread_index() == p.first) {
        system_fence();
        store_flag(flag, 1);
    }
    if (thread_index() == p.second) {
        while (load_flag(flag) == 0) {}
        system_fence();
        flag[1] = 5;
    }
    cta_barrier();
}
void time_passes(const Arguments&) {
    const int64_t begun = nanoseconds();
    while (nanoseconds() == begun) {}
}

// --- code that needs a barrier ---

void wait_then_another_reads(const Arguments& p) {
    begin(p);
    start(p);
    if (thread_index() == p.first) bulk_wait(kCounter, 0);
    wait_at(p.barrier);
    if (thread_index() == p.second) load_shared_32(kPlace);
}
void read_then_bulk_copy(const Arguments& p) {
    fill_shared();
    begin(p);
    if (thread_index() == p.second) load_shared_32(kPlace);
    wait_at(p.barrier);
    start(p);
    bulk_wait(kCounter, 0);
}
void begin_then_expect(const Arguments& p) {
    if (thread_index() == p.first) bulk_begin(kCounter);
    wait_at(p.barrier);
    if (thread_index() != p.second) return;
    bulk_expect(kCounter, 0);
    bulk_wait(kCounter, 0);
}

// --- wrong code ---

void no_wait(const Arguments& p) {
    begin(p);
    start(p);
    cta_barrier();
    if (thread_index() == 9) load_shared_32(kPlace);
}
void wait_for_the_other_phase(const Arguments& p) {
    begin(p);
    start(p);
    bulk_wait(kCounter, 1);
    if (thread_index() == 9) load_shared_32(kPlace);
}
void wait_for_phase_two(const Arguments& p) {
    begin(p);
    start(p);
    bulk_wait(kCounter, 2);
}
void more_expected(const Arguments& p) {
    begin(p);
    start(p, 16, 48);
    bulk_wait(kCounter, 0);
}
void less_expected(const Arguments& p) {
    begin(p);
    start(p, 48, 16);
    bulk_wait(kCounter, 0);
}
void nobody_expects(const Arguments& p) {
    begin(p);
    if (thread_index() == p.first) bulk_copy(kPlace, p.in, 16, kCounter);
    bulk_wait(kCounter, 0);
}
void wait_for_one_phase_too_many(const Arguments& p) {
    begin(p);
    start(p);
    bulk_wait(kCounter, 0);
    bulk_wait(kCounter, 1);
}
void expect_twice(const Arguments& p) {
    begin(p);
    start(p);
    start(p);
}
void begin_twice(const Arguments& p) {
    begin(p);
    begin(p);
}
void expect_before_the_beginning(const Arguments& p) { start(p); }
void expect_where_none_begins(const Arguments& p) {
    fill_shared();
    start(p);
}
void copy_where_none_begins(const Arguments& p) {
    fill_shared();
    bulk_copy(kPlace, p.in, 16, kCounter);
}
void wait_where_none_begins(const Arguments&) {
    fill_shared();
    bulk_wait(kCounter, 0);
}
void misaligned_counter(const Arguments&) { bulk_begin(kCounter - 4); }
void size_of_24(const Arguments& p) {
    begin(p);
    start(p, 24, 24);
}
void misaligned_source(const Arguments& p) {
    begin(p);
    bulk_copy(kPlace, static_cast<const char*>(p.in) + 8, 32, kCounter);
}
void misaligned_target(const Arguments& p) {
    begin(p);
    bulk_copy(kPlace + 8, p.in, 32, kCounter);
}
void source_outside(const Arguments& p) {
    begin(p);
    bulk_copy(kPlace, static_cast<const char*>(p.in) + 48, 32, kCounter);
}
void target_outside(const Arguments& p) {
    begin(p);
    bulk_copy(kPlace + kSharedBytes - 16, p.in, 32, kCounter);
}
void written_meanwhile(const Arguments& p) {
    begin(p);
    start(p);
    cta_barrier();
    if (thread_index() == 9) store_shared_32(kPlace, 0);
}
void two_copies_to_a_place(const Arguments& p) {
    begin(p);
    if (thread_index() != p.first) return;
    bulk_copy(kPlace, p.in, 32, kCounter);
    bulk_copy(kPlace + 16, p.in, 32, kCounter);
}
void return_before_the_end(const Arguments& p) {
    begin(p);
    start(p);
}

int32_t* flag_of(const Arguments& p) { return static_cast<int32_t*>(p.out); }

void raise_without_fence(const Arguments& p) { store_flag(flag_of(p), 1); }
void raise_with_a_fence_before_the_barrier(const Arguments& p) {
    system_fence();
    cta_barrier();
    store_flag(flag_of(p), 1);
}
void raise_what_was_loaded(const Arguments& p) {
    system_fence();
    store_flag(flag_of(p), load_flag(flag_of(p)));
}
void read_without_fence(const Arguments& p) {
    load_flag(flag_of(p));
    load_global_128(p.in);
}
void wait_without_fence(const Arguments& p) {
    if (thread_index() == p.first) load_flag(flag_of(p));
    cta_barrier();
}
void copy_without_bulk_fence(const Arguments& p) {
    begin(p);
    bulk_fence();
    if (thread_index() == 5) load_flag(flag_of(p));
    system_fence();
    cta_barrier();
    start(p);
}
void gives_up(const Arguments&) {
    if (thread_index() == 33) give_up();
}

}  // namespace

PROBE(probe_phases, phases)
PROBE(probe_nothing, nothing)
PROBE(probe_late, late)
PROBE(probe_meet, meet)
PROBE(probe_time_passes, time_passes)
PROBE(probe_wait_then_another_reads, wait_then_another_reads)
PROBE(probe_read_then_bulk_copy, read_then_bulk_copy)
PROBE(probe_begin_then_expect, begin_then_expect)
PROBE(probe_no_wait, no_wait)
PROBE(probe_wait_for_the_other_phase, wait_for_the_other_phase)
PROBE(probe_wait_for_phase_two, wait_for_phase_two)
PROBE(probe_more_expected, more_expected)
PROBE(probe_less_expected, less_expected)
PROBE(probe_nobody_expects, nobody_expects)
PROBE(probe_wait_for_one_phase_too_many, wait_for_one_phase_too_many)
PROBE(probe_expect_twice, expect_twice)
PROBE(probe_begin_twice, begin_twice)
PROBE(probe_expect_before_the_beginning, expect_before_the_beginning)
PROBE(probe_expect_where_none_begins, expect_where_none_begins)
PROBE(probe_copy_where_none_begins, copy_where_none_begins)
PROBE(probe_wait_where_none_begins, wait_where_none_begins)
PROBE(probe_misaligned_counter, misaligned_counter)
PROBE(probe_size_of_24, size_of_24)
PROBE(probe_misaligned_source, misaligned_source)
PROBE(probe_misaligned_target, misaligned_target)
PROBE(probe_source_outside, source_outside)
PROBE(probe_target_outside, target_outside)
PROBE(probe_written_meanwhile, written_meanwhile)
PROBE(probe_two_copies_to_a_place, two_copies_to_a_place)
PROBE(probe_return_before_the_end, return_before_the_end)
PROBE(probe_raise_without_fence, raise_without_fence)
PROBE(probe_raise_with_a_fence_before_the_barrier, raise_with_a_fence_before_the_barrier)
PROBE(probe_raise_what_was_loaded, raise_what_was_loaded)
PROBE(probe_read_without_fence, read_without_fence)
PROBE(probe_wait_without_fence, wait_without_fence)
PROBE(probe_copy_without_bulk_fence, copy_without_bulk_fence)
PROBE(probe_gives_up, gives_up)
