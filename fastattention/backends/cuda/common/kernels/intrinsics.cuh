// Everything in the kernels that is not plain C++: threads, barriers, shared memory, copies, conversions and matrix
// instructions. The emulator of tests/cuda names a header of its own that defines the same functions for a CPU.
//
// Shared memory has 32-bit addresses, in bytes. An instruction that an architecture lacks is an assembler error only in
// kernels that use it.
#pragma once

#include "integers.h"

#ifdef FA_INTRINSICS_HEADER
#include FA_INTRINSICS_HEADER
#else

#define FA_DEVICE __device__ __forceinline__
#define FA_KERNEL __global__
#if __CUDA_ARCH__ >= 700
#define FA_PARAMETER const __grid_constant__
#else
#define FA_PARAMETER const
#endif
#define FA_LAUNCH_BOUNDS(threads, min_ctas) __launch_bounds__(threads, min_ctas)

namespace fastattention {

struct Words2 {
    uint32_t word[2];
};
struct Words4 {
    uint32_t word[4];
};

FA_DEVICE int thread_index() { return threadIdx.x; }
FA_DEVICE int lane_index() { return threadIdx.x & 31; }
// The shuffle tells the compiler that the index is the same for all lanes.
FA_DEVICE int warp_index() { return __shfl_sync(0xffffffffu, threadIdx.x / 32, 0); }
FA_DEVICE int64_t cta_index() { return blockIdx.x; }

// Kernels launched to overlap the previous one (gpu_runtime) wait for its end before they touch what it may have written,
// and tell when the next one may start. Before Hopper, kernels do not overlap.
FA_DEVICE void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
FA_DEVICE void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

FA_DEVICE void cta_barrier() { __syncthreads(); }
// A barrier that returns whether x is true for any thread.
FA_DEVICE bool any_thread(bool x) { return __syncthreads_or(x); }
FA_DEVICE void warp_barrier() { __syncwarp(); }
FA_DEVICE float shuffle_xor(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
FA_DEVICE uint32_t shuffle_xor(uint32_t x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
FA_DEVICE int shuffle_xor(int x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
FA_DEVICE int shuffle(int x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }
FA_DEVICE float shuffle(float x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }

// Returns x, but hides its origin from the compiler: what depends on it is not computed ahead of a loop and kept in
// registers, and neither is what it was computed from.
FA_DEVICE int opaque(int x) {
    asm volatile("" : "+r"(x));
    return x;
}
template <class T>
FA_DEVICE const T* opaque(const T* x) {
    asm volatile("" : "+l"(x));
    return x;
}

// Whether x holds in any lane of the warp, in how many lanes, and in which (one bit per lane).
FA_DEVICE bool any_lane(bool x) { return __any_sync(0xffffffffu, x); }
FA_DEVICE int count_lanes(bool x) { return __popc(__ballot_sync(0xffffffffu, x)); }
FA_DEVICE uint32_t lanes_where(bool x) { return __ballot_sync(0xffffffffu, x); }
FA_DEVICE int count_bits(uint32_t x) { return __popc(x); }

FA_DEVICE uint32_t shared_memory() {
    extern __shared__ __align__(16) char memory[];
    return static_cast<uint32_t>(__cvta_generic_to_shared(memory));
}
FA_DEVICE uint32_t load_shared_32(uint32_t address) {
    uint32_t x;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(address));
    return x;
}
FA_DEVICE Words2 load_shared_64(uint32_t address) {
    Words2 x;
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(x.word[0]), "=r"(x.word[1]) : "r"(address));
    return x;
}
FA_DEVICE Words4 load_shared_128(uint32_t address) {
    Words4 x;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.word[0]), "=r"(x.word[1]), "=r"(x.word[2]), "=r"(x.word[3])
                 : "r"(address));
    return x;
}
FA_DEVICE void store_shared_32(uint32_t address, uint32_t x) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}
FA_DEVICE void store_shared_64(uint32_t address, Words2 x) {
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(address), "r"(x.word[0]), "r"(x.word[1]) : "memory");
}
FA_DEVICE void store_shared_128(uint32_t address, Words4 x) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x.word[0]), "r"(x.word[1]), "r"(x.word[2]),
                 "r"(x.word[3])
                 : "memory");
}
// Adds to a word of shared memory, to which other threads may add at the same time.
FA_DEVICE void add_shared_32(uint32_t address, int x) {
    asm volatile("red.shared.add.s32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}

// Loads 4, 8 or 16 aligned bytes of global memory that is not written during the kernel. From Ampere on, a load of 8 bytes
// makes the L2 cache prefetch the 256 bytes around them.
FA_DEVICE uint32_t load_global_32(const void* address) { return __ldg(static_cast<const uint32_t*>(address)); }
FA_DEVICE Words2 load_global_64(const void* address) {
#if __CUDA_ARCH__ >= 800
    Words2 x;
    asm("ld.global.nc.L2::256B.v2.b32 {%0, %1}, [%2];" : "=r"(x.word[0]), "=r"(x.word[1]) : "l"(address));
    return x;
#else
    const uint2 x = __ldg(static_cast<const uint2*>(address));
    return {x.x, x.y};
#endif
}
FA_DEVICE Words4 load_global_128(const void* address) {
    const uint4 x = __ldg(static_cast<const uint4*>(address));
    return {x.x, x.y, x.z, x.w};
}
// Loads global memory that other CTAs of this kernel may have written.
FA_DEVICE Words2 load_written_64(const void* address) {
    Words2 x;
    asm volatile("ld.global.cg.v2.b32 {%0, %1}, [%2];" : "=r"(x.word[0]), "=r"(x.word[1]) : "l"(address) : "memory");
    return x;
}
FA_DEVICE Words4 load_written_128(const void* address) {
    Words4 x;
    asm volatile("ld.global.cg.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.word[0]), "=r"(x.word[1]), "=r"(x.word[2]), "=r"(x.word[3])
                 : "l"(address)
                 : "memory");
    return x;
}
// Returns zeros unless `valid`. With a branch instead, the compiler would not share address computations with other loads.
FA_DEVICE Words4 load_written_128(const void* address, bool valid) {
    Words4 x;
    asm volatile(
        "{.reg .pred valid;\n"
        "setp.ne.s32 valid, %5, 0;\n"
        "mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0;\n"
        "@valid ld.global.cg.v4.b32 {%0, %1, %2, %3}, [%4];}"
        : "=&r"(x.word[0]), "=&r"(x.word[1]), "=&r"(x.word[2]), "=&r"(x.word[3])
        : "l"(address), "r"(static_cast<int>(valid))
        : "memory");
    return x;
}
// Adds to floats of global memory, which other threads may add to, in any order. From Hopper on, four neighbours, aligned to 16
// bytes, are added at once.
FA_DEVICE void add_global_32(float* address, float x) { atomicAdd(address, x); }
#if __CUDA_ARCH__ >= 900
constexpr bool kAddsFour = true;
#else
constexpr bool kAddsFour = false;
#endif
FA_DEVICE void add_global_128(float* address, const float (&x)[4]) {
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
                 : "memory");
}
// Makes what this thread wrote visible to all threads that learn of it later.
FA_DEVICE void memory_fence() { __threadfence(); }
// Counts `count` arrivals at a counter, which is 0 before the first and again after the last. Returns 1 for the last.
FA_DEVICE uint32_t count_up(int32_t* counter, int count) {
    const unsigned last = static_cast<unsigned>(count) - 1;
    return atomicInc(reinterpret_cast<unsigned*>(counter), last) == last;
}
// A fence between kernels on several GPUs and their streams. A thread that sees a later store of this thread also sees what
// it wrote before, and what it knows of others' writes. And this thread sees what was written before whatever it has loaded.
FA_DEVICE void system_fence() { __threadfence_system(); }
FA_DEVICE int32_t load_flag(const int32_t* flag) { return *static_cast<const volatile int32_t*>(flag); }
FA_DEVICE void store_flag(int32_t* flag, int32_t x) { *static_cast<volatile int32_t*>(flag) = x; }
FA_DEVICE int64_t nanoseconds() {
    int64_t now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}
// Aborts the kernel with an error, and with it all work of the process on this GPU.
FA_DEVICE void give_up() { asm volatile("trap;"); }
FA_DEVICE void store_global_64(void* address, Words2 x) { *static_cast<uint2*>(address) = make_uint2(x.word[0], x.word[1]); }
FA_DEVICE void store_global_128(void* address, Words4 x) {
    *static_cast<uint4*>(address) = make_uint4(x.word[0], x.word[1], x.word[2], x.word[3]);
}

FA_DEVICE float as_float(uint32_t x) { return __uint_as_float(x); }
FA_DEVICE uint32_t as_bits(float x) { return __float_as_uint(x); }
FA_DEVICE float magnitude(float x) { return fabsf(x); }
// If one is NaN, returns the other.
FA_DEVICE float maximum(float a, float b) { return fmaxf(a, b); }
// a * b + c, rounded once, and a * b, which no sum may take into its rounding.
FA_DEVICE float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
FA_DEVICE float multiply_rounded(float a, float b) { return __fmul_rn(a, b); }
// x, or 0 if x is above it; NaN if x is.
FA_DEVICE float at_most_zero(float x) {
#if __CUDA_ARCH__ >= 800
    asm("min.NaN.f32 %0, %0, 0f00000000;" : "+f"(x));
    return x;
#else
    return x > 0.0f ? 0.0f : x;
#endif
}
// x, or 0 if x is below it; NaN if x is.
FA_DEVICE float at_least_zero(float x) {
#if __CUDA_ARCH__ >= 800
    asm("max.NaN.f32 %0, %0, 0f00000000;" : "+f"(x));
    return x;
#else
    return x < 0.0f ? 0.0f : x;
#endif
}
// 2^x to two units in the last place; 0 for -infinity.
FA_DEVICE float exp2_approximate(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// Accurate to two units in the last place; 0 for -infinity.
FA_DEVICE float exp_exact(float x) { return expf(x); }
FA_DEVICE float tanh_exact(float x) { return tanhf(x); }
// 1 / sqrt(x), to two units in the last place.
FA_DEVICE float reciprocal_root(float x) { return rsqrtf(x); }
// Accurate to 2^-22, absolute near 1 and relative elsewhere.
FA_DEVICE float log2_approximate(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// Accurate to one unit in the last place, without the function call of an exact division.
FA_DEVICE float reciprocal_approximate(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

FA_DEVICE uint32_t pack_float16(float low, float high) {
    uint32_t x;
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
#else
    asm("{.reg .b16 l, h; cvt.rn.f16.f32 l, %1; cvt.rn.f16.f32 h, %2; mov.b32 %0, {l, h};}" : "=r"(x) : "f"(low), "f"(high));
#endif
    return x;
}
FA_DEVICE float float16_to_float(uint16_t bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}

FA_DEVICE uint32_t pack_bfloat16(float low, float high) {
#if __CUDA_ARCH__ >= 800
    uint32_t x;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
    return x;
#else
    // Round to nearest even; a NaN gets all high bits set, so it stays NaN.
    const auto rounded = [](float x) {
        const uint32_t bits = __float_as_uint(x);
        return x == x ? bits + 0x7fffu + (bits >> 16 & 1u) : 0x7fffffffu;
    };
    return rounded(low) >> 16 | (rounded(high) & 0xffff0000u);
#endif
}

// a - b for two float16 in each word.
FA_DEVICE uint32_t subtract_float16(uint32_t a, uint32_t b) {
    uint32_t x;
    asm("sub.f16x2 %0, %1, %2;" : "=r"(x) : "r"(a), "r"(b));
    return x;
}
// Byte i of the result is selected by hexadecimal digit i of the selector from the bytes of a (0 to 3) and b (4 to 7).
FA_DEVICE uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selector) { return __byte_perm(a, b, selector); }
// The high 32 bits of the 64-bit product.
FA_DEVICE uint32_t multiply_high(uint32_t a, uint32_t b) { return __umulhi(a, b); }
// a / b, correctly rounded.
FA_DEVICE float divided(float a, float b) { return __fdiv_rn(a, b); }
// Rounds to the nearest integer, ties to even.
FA_DEVICE int round_to_integer(float x) { return __float2int_rn(x); }

// Copies 16 bytes from global to shared memory, or zeros if not `valid`, without a read. The L2 cache prefetches 128 bytes.
FA_DEVICE void copy_async_128(uint32_t to, const void* from, bool valid) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0)
                 : "memory");
}
FA_DEVICE void copy_async_32(uint32_t to, const void* from, bool valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(valid ? 4 : 0) : "memory");
}
FA_DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most kPending of the groups that this thread committed are in flight.
template <int kPending>
FA_DEVICE void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Bulk copies to shared memory by the copy engine (TMA), from Hopper on. `counter` is an mbarrier, 8 bytes of shared memory
// by which threads learn that a copy has ended. Each use is a phase, in which one thread announces how many bytes will come.
FA_DEVICE void bulk_begin(uint32_t counter) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1; fence.proxy.async.shared::cta;" ::"r"(counter) : "memory");
}
FA_DEVICE void bulk_expect(uint32_t counter, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(counter), "r"(bytes) : "memory");
}
// bytes: a multiple of 16; addresses are aligned to 16.
FA_DEVICE void bulk_copy(uint32_t to, const void* from, uint32_t bytes, uint32_t counter) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(counter)
                 : "memory");
}
// Waits until all bytes of a phase have come. phase: the lowest bit of its index.
FA_DEVICE void bulk_wait(uint32_t counter, uint32_t phase) {
    asm volatile("{.reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; @!done bra again;}"
                 :
                 : "r"(counter), "r"(phase)
                 : "memory");
}
// Orders writes of threads, and writes they know of, before later bulk copies. Does nothing before Hopper.
FA_DEVICE void bulk_fence() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async;" ::: "memory");
#endif
}

// Loads four 8 x 8 matrices of 16-bit elements. Lanes 8i ... 8i + 7 give the addresses of matrix i's rows; lane l receives
// elements 2 (l % 4) and the next of row l / 4, or, transposed, of column l / 4.
FA_DEVICE void load_matrices(uint32_t (&x)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address));
}
FA_DEVICE void load_matrices_transposed(uint32_t (&x)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address));
}

FA_DEVICE void mma_m16n8k8_float16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t b) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(b));
}

#define FA_MMA_M16N8K16(name, type)                                                        \
    FA_DEVICE void name(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) { \
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                \
                     ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "                           \
                     "{%8, %9}, {%0, %1, %2, %3};"                                         \
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                      \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));      \
    }
FA_MMA_M16N8K16(mma_m16n8k16_float16, "f16")
FA_MMA_M16N8K16(mma_m16n8k16_bfloat16, "bf16")
#undef FA_MMA_M16N8K16

// Multiplies signed bytes; c holds the bits of integers.
FA_DEVICE void mma_m16n8k32_int8(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    uint32_t d[4] = {as_bits(c[0]), as_bits(c[1]), as_bits(c[2]), as_bits(c[3])};
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#pragma unroll
    for (int i = 0; i < 4; ++i) c[i] = as_float(d[i]);
}
FA_DEVICE void mma_m8n8k16_int8(float& c0, float& c1, uint32_t a, uint32_t b) {
    uint32_t d0 = as_bits(c0), d1 = as_bits(c1);
    asm volatile("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
                 : "+r"(d0), "+r"(d1)
                 : "r"(a), "r"(b));
    c0 = as_float(d0);
    c1 = as_float(d1);
}

// Four independent products, one for each quadpair of lanes. docs/internals/volta.md draws the layout of operands.
#define FA_MMA_M8N8K4(name, layout_b)                                                                                 \
    FA_DEVICE void name(float (&c)[8], uint32_t a0, uint32_t a1, uint32_t b0, uint32_t b1) {                          \
        asm volatile("mma.sync.aligned.m8n8k4.row." layout_b                                                          \
                     ".f32.f16.f16.f32 {%0, %1, %2, %3, %4, %5, %6, %7}, "                                            \
                     "{%8, %9}, {%10, %11}, {%0, %1, %2, %3, %4, %5, %6, %7};"                                        \
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]) \
                     : "r"(a0), "r"(a1), "r"(b0), "r"(b1));                                                           \
    }
FA_MMA_M8N8K4(mma_m8n8k4_row_col, "col")
FA_MMA_M8N8K4(mma_m8n8k4_row_row, "row")
#undef FA_MMA_M8N8K4

}  // namespace fastattention

#endif
