// The functions of kernels/intrinsics.cuh for the emulator.
#pragma once

#include <cmath>

#include "collectives.hpp"
#include "machine.hpp"
#include "numbers.hpp"
#include "shared_memory.hpp"

#define FA_DEVICE inline
#define FA_KERNEL
#define FA_PARAMETER const
#define FA_LAUNCH_BOUNDS(threads, min_ctas)

namespace fastattention {

struct Words2 {
    uint32_t word[2];
};
struct Words4 {
    uint32_t word[4];
};

FA_DEVICE int thread_index() { return emulator::current->index; }
FA_DEVICE int lane_index() { return emulator::current->lane; }
FA_DEVICE int64_t cta_index() { return emulator::cta; }

FA_DEVICE void wait_for_previous_kernel() {}
FA_DEVICE void let_next_kernel_start() {}
FA_DEVICE void cta_barrier() { emulator::cta_barrier(); }
FA_DEVICE bool any_thread(bool x) { return emulator::any_thread(x); }
FA_DEVICE void warp_barrier() { emulator::warp_barrier(); }
FA_DEVICE uint32_t shuffle_xor(uint32_t x, int mask) { return emulator::shuffle(x, lane_index() ^ mask); }
FA_DEVICE int shuffle(int x, int lane) { return static_cast<int>(emulator::shuffle(static_cast<uint32_t>(x), lane & 31)); }
FA_DEVICE int shuffle_xor(int x, int mask) { return shuffle(x, lane_index() ^ mask); }
FA_DEVICE float shuffle(float x, int lane) {
    return emulator::float_of_bits(emulator::shuffle(emulator::bits_of_float(x), lane));
}
FA_DEVICE float shuffle_xor(float x, int mask) { return shuffle(x, lane_index() ^ mask); }
FA_DEVICE int opaque(int x) { return x; }
template <class T>
FA_DEVICE const T* opaque(const T* x) {
    return x;
}
FA_DEVICE bool any_lane(bool x) { return emulator::any_lane(x); }
FA_DEVICE uint32_t lanes_where(bool x) {
    uint32_t lanes = 0;
    for (int lane = 0; lane < emulator::kLanes; ++lane) lanes |= emulator::shuffle(x, lane) << lane;
    return lanes;
}
FA_DEVICE int count_bits(uint32_t x) { return __builtin_popcount(x); }
FA_DEVICE int count_lanes(bool x) { return count_bits(lanes_where(x)); }
// A shuffle, as on a GPU: all lanes must call it.
FA_DEVICE int warp_index() { return static_cast<int>(emulator::shuffle(thread_index() / 32, 0)); }

template <emulator::Access kAccess, class Value>
Value load_shared(uint32_t address) {
    Value x;
    emulator::read_shared(*emulator::current, address, &x, sizeof x);
    emulator::current->warp->accesses.add(lane_index(), kAccess, address);
    return x;
}

template <emulator::Access kAccess, class Value>
void store_shared(uint32_t address, Value x) {
    emulator::write_shared(*emulator::current, address, &x, sizeof x);
    emulator::current->warp->accesses.add(lane_index(), kAccess, address);
}

FA_DEVICE uint32_t shared_memory() { return emulator::kSharedBase; }
FA_DEVICE uint32_t load_shared_32(uint32_t address) { return load_shared<emulator::Access::kLoad32, uint32_t>(address); }
FA_DEVICE Words2 load_shared_64(uint32_t address) { return load_shared<emulator::Access::kLoad64, Words2>(address); }
FA_DEVICE Words4 load_shared_128(uint32_t address) { return load_shared<emulator::Access::kLoad128, Words4>(address); }
FA_DEVICE void store_shared_32(uint32_t address, uint32_t x) { store_shared<emulator::Access::kStore32>(address, x); }
FA_DEVICE void add_shared_32(uint32_t address, int x) { emulator::add_shared(*emulator::current, address, x); }
FA_DEVICE void store_shared_64(uint32_t address, Words2 x) { store_shared<emulator::Access::kStore64>(address, x); }
FA_DEVICE void store_shared_128(uint32_t address, Words4 x) { store_shared<emulator::Access::kStore128>(address, x); }

FA_DEVICE uint32_t load_global_32(const void* address) {
    emulator::check_global(address, 4, "reads", true);
    return *static_cast<const uint32_t*>(address);
}
FA_DEVICE Words2 load_global_64(const void* address) {
    emulator::check_global(address, 8, "reads", true);
    return *static_cast<const Words2*>(address);
}
FA_DEVICE Words4 load_global_128(const void* address) {
    emulator::check_global(address, 16, "reads", true);
    return *static_cast<const Words4*>(address);
}
FA_DEVICE Words2 load_written_64(const void* address) {
    emulator::check_global(address, 8, "reads", true);
    return *static_cast<const Words2*>(address);
}
FA_DEVICE Words4 load_written_128(const void* address) { return load_global_128(address); }
FA_DEVICE Words4 load_written_128(const void* address, bool valid) { return valid ? load_global_128(address) : Words4{}; }
FA_DEVICE void add_global_32(float* address, float x) {
    emulator::check_global(address, 4, "adds", true);
    *address += x;
}
constexpr bool kAddsFour = true;
FA_DEVICE void add_global_128(float* address, const float (&x)[4]) {
    emulator::check_global(address, 16, "adds", true);
    for (int i = 0; i < 4; ++i) address[i] += x[i];
}
FA_DEVICE void memory_fence() {}
FA_DEVICE uint32_t count_up(int32_t* counter, int count) {
    const bool is_last = *counter == count - 1;
    *counter = is_last ? 0 : *counter + 1;
    return is_last;
}
FA_DEVICE void system_fence() { emulator::system_fence(*emulator::current); }
FA_DEVICE int32_t load_flag(const int32_t* flag) { return emulator::load_flag(*emulator::current, flag); }
FA_DEVICE void store_flag(int32_t* flag, int32_t x) { emulator::store_flag(*emulator::current, flag, x); }
FA_DEVICE int64_t nanoseconds() { return emulator::nanoseconds(); }
FA_DEVICE void give_up() { emulator::fail(*emulator::current, "gave up"); }
FA_DEVICE void store_global_64(void* address, Words2 x) {
    emulator::check_global(address, 8, "writes", true);
    *static_cast<Words2*>(address) = x;
}
FA_DEVICE void store_global_128(void* address, Words4 x) {
    emulator::check_global(address, 16, "writes", true);
    *static_cast<Words4*>(address) = x;
}

FA_DEVICE float as_float(uint32_t x) { return emulator::float_of_bits(x); }
FA_DEVICE uint32_t as_bits(float x) { return emulator::bits_of_float(x); }
FA_DEVICE float magnitude(float x) { return std::fabs(x); }
FA_DEVICE float maximum(float a, float b) { return std::fmax(a, b); }
// Flushes a subnormal value to zero, as .ftz instructions do for what they read and write.
FA_DEVICE float flushed(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }
FA_DEVICE float multiply_add(float a, float b, float c) { return static_cast<float>(static_cast<double>(a) * b + c); }
FA_DEVICE float multiply_rounded(float a, float b) { return a * b; }
FA_DEVICE float at_most_zero(float x) { return x > 0.0f ? 0.0f : x; }
FA_DEVICE float at_least_zero(float x) { return x < 0.0f ? 0.0f : x; }
FA_DEVICE float exp2_approximate(float x) { return flushed(std::exp2(flushed(x))); }
FA_DEVICE float log2_approximate(float x) { return std::log2(flushed(x)); }
FA_DEVICE float reciprocal_approximate(float x) { return flushed(1.0f / flushed(x)); }
FA_DEVICE float exp_exact(float x) { return flushed(std::exp(x)); }
FA_DEVICE float tanh_exact(float x) { return std::tanh(x); }
FA_DEVICE float reciprocal_root(float x) { return 1.0f / std::sqrt(flushed(x)); }

FA_DEVICE uint32_t pack_float16(float low, float high) {
    return emulator::float_to_float16(low) | static_cast<uint32_t>(emulator::float_to_float16(high)) << 16;
}
FA_DEVICE float float16_to_float(uint16_t bits) { return emulator::float16_to_float(bits); }
FA_DEVICE uint32_t pack_bfloat16(float low, float high) {
    return emulator::float_to_bfloat16(low) | static_cast<uint32_t>(emulator::float_to_bfloat16(high)) << 16;
}

FA_DEVICE uint32_t subtract_float16(uint32_t a, uint32_t b) {
    const auto half = [&](int shift) {
        return float16_to_float(static_cast<uint16_t>(a >> shift)) - float16_to_float(static_cast<uint16_t>(b >> shift));
    };
    return pack_float16(half(0), half(16));
}
FA_DEVICE uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selector) {
    uint32_t x = 0;
    for (int i = 0; i < 4; ++i) {
        const uint32_t which = selector >> 4 * i & 7;
        x |= ((which < 4 ? a : b) >> which % 4 * 8 & 0xffu) << 8 * i;
    }
    return x;
}
FA_DEVICE uint32_t multiply_high(uint32_t a, uint32_t b) { return static_cast<uint64_t>(a) * b >> 32; }
FA_DEVICE float divided(float a, float b) { return a / b; }
FA_DEVICE int round_to_integer(float x) { return static_cast<int>(std::nearbyint(x)); }

FA_DEVICE void copy_async_32(uint32_t to, const void* from, bool valid) {
    emulator::start_copy(*emulator::current, to, valid ? from : nullptr, 4);
}
FA_DEVICE void copy_async_128(uint32_t to, const void* from, bool valid) {
    // The address must be aligned even if nothing is read.
    emulator::check_global(from, 16, "copies", valid);
    emulator::start_copy(*emulator::current, to, valid ? from : nullptr, 16);
    emulator::current->warp->accesses.add(lane_index(), emulator::Access::kCopy128, to);
}
FA_DEVICE void copy_async_commit() { ++emulator::current->num_groups; }
template <int kPending>
FA_DEVICE void copy_async_wait() {
    emulator::wait_for_copies(*emulator::current, kPending);
}

FA_DEVICE void bulk_begin(uint32_t counter) { emulator::begin_counter(*emulator::current, counter); }
FA_DEVICE void bulk_expect(uint32_t counter, uint32_t bytes) { emulator::expect_bytes(*emulator::current, counter, bytes); }
FA_DEVICE void bulk_copy(uint32_t to, const void* from, uint32_t bytes, uint32_t counter) {
    emulator::start_bulk_copy(*emulator::current, to, from, bytes, counter);
}
FA_DEVICE void bulk_wait(uint32_t counter, uint32_t phase) { emulator::wait_for_bytes(*emulator::current, counter, phase); }
FA_DEVICE void bulk_fence() { emulator::bulk_fence(*emulator::current); }

FA_DEVICE void load_matrices(uint32_t (&x)[4], uint32_t address) { emulator::load_matrices(x, address); }
FA_DEVICE void load_matrices_transposed(uint32_t (&x)[4], uint32_t address) {
    emulator::load_matrices_transposed(x, address);
}

FA_DEVICE void mma_m16n8k8_float16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t b) {
    const uint32_t a[2] = {a0, a1};
    emulator::mma_m16n8k8_float16(c, a, &b);
}
FA_DEVICE void mma_m16n8k16_float16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    const uint32_t b[2] = {b0, b1};
    emulator::mma_m16n8k16_float16(c, a, b);
}
FA_DEVICE void mma_m16n8k16_bfloat16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    const uint32_t b[2] = {b0, b1};
    emulator::mma_m16n8k16_bfloat16(c, a, b);
}
FA_DEVICE void mma_m16n8k32_int8(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    const uint32_t b[2] = {b0, b1};
    emulator::mma_m16n8k32_int8(c, a, b);
}
FA_DEVICE void mma_m8n8k16_int8(float& c0, float& c1, uint32_t a, uint32_t b) {
    float c[2] = {c0, c1};
    emulator::mma_m8n8k16_int8(c, &a, &b);
    c0 = c[0];
    c1 = c[1];
}
FA_DEVICE void mma_m8n8k4_row_col(float (&c)[8], uint32_t a0, uint32_t a1, uint32_t b0, uint32_t b1) {
    const uint32_t a[2] = {a0, a1}, b[2] = {b0, b1};
    emulator::mma_m8n8k4_row_col(c, a, b);
}
FA_DEVICE void mma_m8n8k4_row_row(float (&c)[8], uint32_t a0, uint32_t a1, uint32_t b0, uint32_t b1) {
    const uint32_t a[2] = {a0, a1}, b[2] = {b0, b1};
    emulator::mma_m8n8k4_row_row(c, a, b);
}

}  // namespace fastattention
