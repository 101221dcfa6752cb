// Small kernels that test the emulator: some do one thing right, some do one thing wrong. test_emulator.py names them.
#include "probes.hpp"

#include <cstring>

namespace {

const uint32_t* words_of_lane(const Arguments& p, int count) {
    return static_cast<const uint32_t*>(p.in) + lane_index() * count;
}

// --- correct code ---

// in: operands a and b of each lane; out: accumulators of each lane, before and after.
template <int kWordsOfA, int kWordsOfB, int kElements, class Mma>
void run_mma(const Arguments& p, Mma mma) {
    if (thread_index() >= 32) return;
    const uint32_t* words = words_of_lane(p, kWordsOfA + kWordsOfB);
    uint32_t a[kWordsOfA], b[kWordsOfB];
    float c[kElements];
    float* out = static_cast<float*>(p.out) + lane_index() * kElements;
    std::memcpy(a, words, sizeof a);
    std::memcpy(b, words + kWordsOfA, sizeof b);
    std::memcpy(c, out, sizeof c);
    mma(c, a, b);
    std::memcpy(out, c, sizeof c);
}

void m16n8k8_float16(const Arguments& p) {
    run_mma<2, 1, 4>(p, [](auto& c, auto& a, auto& b) { mma_m16n8k8_float16(c, a[0], a[1], b[0]); });
}
void m16n8k16_float16(const Arguments& p) {
    run_mma<4, 2, 4>(p, [](auto& c, auto& a, auto& b) { mma_m16n8k16_float16(c, a, b[0], b[1]); });
}
void m16n8k16_bfloat16(const Arguments& p) {
    run_mma<4, 2, 4>(p, [](auto& c, auto& a, auto& b) { mma_m16n8k16_bfloat16(c, a, b[0], b[1]); });
}
void m8n8k4_row_col(const Arguments& p) {
    run_mma<2, 2, 8>(p, [](auto& c, auto& a, auto& b) { mma_m8n8k4_row_col(c, a[0], a[1], b[0], b[1]); });
}
void m8n8k4_row_row(const Arguments& p) {
    run_mma<2, 2, 8>(p, [](auto& c, auto& a, auto& b) { mma_m8n8k4_row_row(c, a[0], a[1], b[0], b[1]); });
}

// in: 16 bytes of each lane; out: what each lane loads.
template <bool kTransposed>
void run_load_matrices(const Arguments& p) {
    if (thread_index() >= 32) return;
    const uint32_t address = shared_memory() + lane_index() * 16;
    store_shared_128(address, load_global_128(words_of_lane(p, 4)));
    warp_barrier();
    uint32_t x[4];
    if (kTransposed) {
        load_matrices_transposed(x, address);
    } else {
        load_matrices(x, address);
    }
    std::memcpy(static_cast<uint32_t*>(p.out) + lane_index() * 4, x, sizeof x);
}

// out, for each lane: its warp, lane ^ first, lane 7's lane index, whether any lane is thread `second`
void exchange(const Arguments& p) {
    int* out = static_cast<int*>(p.out) + thread_index() * 4;
    out[0] = warp_index();
    out[1] = static_cast<int>(shuffle_xor(static_cast<uint32_t>(lane_index()), p.first));
    out[2] = static_cast<int>(shuffle(static_cast<float>(lane_index()), 7));
    out[3] = any_lane(thread_index() == p.second);
}

// in: 32 floats; out: each as float16 and as bfloat16
void convert(const Arguments& p) {
    if (thread_index() >= 32) return;
    const float x = as_float(*words_of_lane(p, 1));
    uint16_t* out = static_cast<uint16_t*>(p.out) + lane_index() * 2;
    out[0] = static_cast<uint16_t>(pack_float16(x, 0.0f));
    out[1] = static_cast<uint16_t>(pack_bfloat16(0.0f, x) >> 16);
}

// in: 32 float16 values; out: the same as floats
void widen(const Arguments& p) {
    if (thread_index() >= 32) return;
    static_cast<float*>(p.out)[lane_index()] = float16_to_float(static_cast<const uint16_t*>(p.in)[lane_index()]);
}

// Lanes of a warp access `first` bytes at a distance of `second`.
void strided_loads(const Arguments& p) {
    fill_shared();
    if (thread_index() >= 32) return;
    const uint32_t address = shared_memory() + lane_index() * p.second;
    if (p.first == 4) load_shared_32(address);
    if (p.first == 8) load_shared_64(address);
    if (p.first == 16) load_shared_128(address);
}
void strided_stores(const Arguments& p) {
    if (thread_index() >= 32) return;
    const uint32_t address = shared_memory() + lane_index() * p.second;
    if (p.first == 4) store_shared_32(address, 0);
    if (p.first == 16) store_shared_128(address, Words4{});
}
void strided_matrices(const Arguments& p) {
    fill_shared();
    if (thread_index() >= 32) return;
    uint32_t x[4];
    load_matrices(x, shared_memory() + lane_index() * p.second);
}
void strided_copies(const Arguments& p) {
    if (thread_index() >= 32) return;
    copy_async_128(shared_memory() + lane_index() * p.second, p.in, true);
}

// --- code that needs a barrier ---

void write_then_read(const Arguments& p) {
    fill_shared();
    if (thread_index() == p.first) store_shared_32(shared_memory(), 1);
    wait_at(p.barrier);
    if (thread_index() == p.second) load_shared_32(shared_memory());
}
void read_then_write(const Arguments& p) {
    fill_shared();
    if (thread_index() == p.first) load_shared_32(shared_memory());
    wait_at(p.barrier);
    if (thread_index() == p.second) store_shared_32(shared_memory(), 1);
}
void write_then_write(const Arguments& p) {
    fill_shared();
    if (thread_index() == p.first) store_shared_32(shared_memory(), 1);
    wait_at(p.barrier);
    if (thread_index() == p.second) store_shared_32(shared_memory(), 2);
}
// More threads read than the emulator remembers.
void all_read_then_one_writes(const Arguments& p) {
    fill_shared();
    load_shared_32(shared_memory());
    wait_at(p.barrier);
    if (thread_index() == p.second) store_shared_32(shared_memory(), 1);
}
void copy_then_read(const Arguments& p) {
    fill_shared();
    if (thread_index() == p.first) copy_async_128(shared_memory(), p.in, true);
    copy_async_commit();
    copy_async_wait<0>();
    wait_at(p.barrier);
    if (thread_index() == p.second) load_shared_32(shared_memory());
}
void read_then_copy(const Arguments& p) {
    fill_shared();
    if (thread_index() == p.first) load_shared_32(shared_memory());
    wait_at(p.barrier);
    if (thread_index() == p.second) copy_async_128(shared_memory(), p.in, true);
}

// All threads add their index to a word, and those from `first` on -1 to the next one. out: both, which thread `second` reads.
void add_then_read(const Arguments& p) {
    fill_shared();
    add_shared_32(shared_memory(), thread_index());
    if (thread_index() >= p.first) add_shared_32(shared_memory() + 4, -1);
    wait_at(p.barrier);
    if (thread_index() != p.second) return;
    for (int i = 0; i < 2; ++i) static_cast<uint32_t*>(p.out)[i] = load_shared_32(shared_memory() + i * 4);
}
void read_then_add(const Arguments& p) {
    fill_shared();
    if (thread_index() == p.first) load_shared_32(shared_memory());
    wait_at(p.barrier);
    if (thread_index() == p.second) add_shared_32(shared_memory(), 1);
}
void write_then_add(const Arguments& p) {
    fill_shared();
    if (thread_index() == p.first) store_shared_32(shared_memory(), 1);
    wait_at(p.barrier);
    if (thread_index() == p.second) add_shared_32(shared_memory(), 1);
}
void add_then_write(const Arguments& p) {
    fill_shared();
    if (thread_index() == p.first) add_shared_32(shared_memory(), 1);
    wait_at(p.barrier);
    if (thread_index() == p.second) store_shared_32(shared_memory(), 1);
}
void copy_then_add(const Arguments& p) {
    fill_shared();
    if (thread_index() == p.first) copy_async_128(shared_memory(), p.in, true);
    copy_async_commit();
    copy_async_wait<0>();
    wait_at(p.barrier);
    if (thread_index() == p.second) add_shared_32(shared_memory(), 1);
}

// Commits two groups and waits for the first one only.
void two_copies(const Arguments& p) {
    if (thread_index() >= 32) return;
    const uint32_t address = shared_memory() + lane_index() * 32;
    copy_async_128(address, p.in, true);
    copy_async_commit();
    copy_async_128(address + 16, p.in, false);
    copy_async_commit();
    copy_async_wait<1>();
    static_cast<uint32_t*>(p.out)[lane_index()] = load_shared_32(address);
    if (p.barrier == 0) load_shared_32(address + 16);
}

// --- wrong code ---

void copy_without_wait(const Arguments& p) {
    fill_shared();
    copy_async_128(shared_memory() + thread_index() * 16, p.in, true);
    copy_async_commit();
    cta_barrier();
    load_shared_32(shared_memory() + thread_index() * 16);
}
void copy_without_commit(const Arguments& p) {
    copy_async_128(shared_memory() + thread_index() * 16, p.in, true);
    copy_async_wait<0>();
    load_shared_32(shared_memory() + thread_index() * 16);
}
void read_unwritten(const Arguments&) { load_shared_32(shared_memory() + 64); }
void add_to_unwritten(const Arguments&) { add_shared_32(shared_memory() + 64, 1); }
void add_to_a_copy(const Arguments& p) {
    fill_shared();
    copy_async_128(shared_memory() + thread_index() * 16, p.in, true);
    add_shared_32(shared_memory() + thread_index() * 16, 1);
}
void add_past_the_end(const Arguments&) { add_shared_32(shared_memory() + kSharedBytes, 1); }
void past_the_end(const Arguments&) { store_shared_32(shared_memory() + kSharedBytes, 0); }
void before_the_beginning(const Arguments&) { store_shared_32(shared_memory() - 4, 0); }
void misaligned(const Arguments&) { store_shared_128(shared_memory() + 8, Words4{}); }
void matrices_past_the_end(const Arguments&) {
    fill_shared();
    uint32_t x[4];
    load_matrices(x, shared_memory() + kSharedBytes - 16 + lane_index() / 31 * 16);
}
void one_warp_misses_a_barrier(const Arguments&) {
    cta_barrier();
    if (thread_index() < 32) return;
    cta_barrier();
}
void one_lane_misses_a_barrier(const Arguments&) {
    cta_barrier();
    if (thread_index() == 40) return;
    cta_barrier();
}
void lanes_wait_apart(const Arguments&) {
    if (lane_index() < 5) {
        warp_barrier();
    } else {
        any_lane(true);
    }
}
void half_a_warp_waits_for_the_cta(const Arguments&) {
    if (lane_index() < 16) cta_barrier();
    warp_barrier();
}
void shuffle_without_a_lane(const Arguments&) {
    if (lane_index() == 9) return;
    shuffle_xor(1.0f, 1);
}
void return_before_others_shuffle(const Arguments&) {
    if (lane_index() == 0) return;
    shuffle_xor(1.0f, 1);
}
// out: a word for each thread; bit i is the outcome of vote i that the thread sees. Thread `first` votes true in the first
// vote, then all threads do, then none.
void vote(const Arguments& p) {
    const int votes = (thread_index() == p.first) | 2;
    uint32_t seen = 0;
    for (int i = 0; i < 3; ++i) seen |= static_cast<uint32_t>(any_thread(votes >> i & 1)) << i;
    static_cast<uint32_t*>(p.out)[thread_index()] = seen;
}

// out: a counter, then its value when each warp of each CTA began.
void take_turns(const Arguments& p) {
    auto* out = static_cast<std::int32_t*>(p.out);
    if (lane_index() == 0) out[1 + cta_index() * kWarps + thread_index() / 32] = out[0]++;
}

void fail_in_the_second_cta(const Arguments&) {
    if (cta_index() == 1 && thread_index() == 33) load_shared_32(shared_memory());
}

// Threads that return before the first barrier do not count.
void one_warp_returns_first(const Arguments& p) {
    if (thread_index() < 32) return;
    cta_barrier();
    cta_barrier();
    if (thread_index() == 32) *static_cast<int*>(p.out) = 1;
}

// These access global memory `first` bytes after `in` or `out`.
void load_global(const Arguments& p) { load_global_128(static_cast<const char*>(p.in) + p.first); }
void store_global(const Arguments& p) { store_global_128(static_cast<char*>(p.out) + p.first, Words4{}); }
void copy_global(const Arguments& p) {
    copy_async_128(shared_memory() + thread_index() * 16, static_cast<const char*>(p.in) + p.first, true);
}
void copy_nothing(const Arguments& p) {
    copy_async_128(shared_memory() + thread_index() * 16, static_cast<const char*>(p.in) + p.first, false);
}

}  // namespace

PROBE(probe_m16n8k8_float16, m16n8k8_float16)
PROBE(probe_m16n8k16_float16, m16n8k16_float16)
PROBE(probe_m16n8k16_bfloat16, m16n8k16_bfloat16)
PROBE(probe_m8n8k4_row_col, m8n8k4_row_col)
PROBE(probe_m8n8k4_row_row, m8n8k4_row_row)
PROBE(probe_load_matrices, run_load_matrices<false>)
PROBE(probe_load_matrices_transposed, run_load_matrices<true>)
PROBE(probe_exchange, exchange)
PROBE(probe_convert, convert)
PROBE(probe_widen, widen)
PROBE(probe_strided_loads, strided_loads)
PROBE(probe_strided_stores, strided_stores)
PROBE(probe_strided_matrices, strided_matrices)
PROBE(probe_strided_copies, strided_copies)
PROBE(probe_write_then_read, write_then_read)
PROBE(probe_read_then_write, read_then_write)
PROBE(probe_write_then_write, write_then_write)
PROBE(probe_all_read_then_one_writes, all_read_then_one_writes)
PROBE(probe_copy_then_read, copy_then_read)
PROBE(probe_read_then_copy, read_then_copy)
PROBE(probe_add_then_read, add_then_read)
PROBE(probe_read_then_add, read_then_add)
PROBE(probe_write_then_add, write_then_add)
PROBE(probe_add_then_write, add_then_write)
PROBE(probe_copy_then_add, copy_then_add)
PROBE(probe_two_copies, two_copies)
PROBE(probe_copy_without_wait, copy_without_wait)
PROBE(probe_copy_without_commit, copy_without_commit)
PROBE(probe_read_unwritten, read_unwritten)
PROBE(probe_add_to_unwritten, add_to_unwritten)
PROBE(probe_add_to_a_copy, add_to_a_copy)
PROBE(probe_add_past_the_end, add_past_the_end)
PROBE(probe_past_the_end, past_the_end)
PROBE(probe_before_the_beginning, before_the_beginning)
PROBE(probe_misaligned, misaligned)
PROBE(probe_matrices_past_the_end, matrices_past_the_end)
PROBE(probe_one_warp_misses_a_barrier, one_warp_misses_a_barrier)
PROBE(probe_one_lane_misses_a_barrier, one_lane_misses_a_barrier)
PROBE(probe_lanes_wait_apart, lanes_wait_apart)
PROBE(probe_half_a_warp_waits_for_the_cta, half_a_warp_waits_for_the_cta)
PROBE(probe_shuffle_without_a_lane, shuffle_without_a_lane)
PROBE(probe_return_before_others_shuffle, return_before_others_shuffle)
PROBE(probe_fail_in_the_second_cta, fail_in_the_second_cta)
PROBE(probe_vote, vote)
PROBE(probe_take_turns, take_turns)
PROBE(probe_one_warp_returns_first, one_warp_returns_first)
PROBE(probe_load_global, load_global)
PROBE(probe_store_global, store_global)
PROBE(probe_copy_global, copy_global)
PROBE(probe_copy_nothing, copy_nothing)
