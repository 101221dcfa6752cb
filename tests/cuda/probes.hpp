// Shared parts of the small kernels that test the emulator.
#pragma once

#include "intrinsics.cuh"
#include "machine.hpp"

using namespace fastattention;

namespace {

struct Arguments {
    const void* in;
    void* out;
    std::int32_t first, second;  // threads, or a size and a stride
    std::int32_t barrier;        // between what the threads do: 0 none, 1 of the warp, 2 of the CTA
};

constexpr int kWarps = 2;
constexpr uint32_t kSharedBytes = 8192;

inline void fill_shared() {
    for (uint32_t i = static_cast<uint32_t>(thread_index()) * 16; i < kSharedBytes; i += kWarps * 32 * 16)
        store_shared_128(shared_memory() + i, Words4{});
    cta_barrier();
}

inline void wait_at(int barrier) {
    if (barrier == 1) warp_barrier();
    if (barrier == 2) cta_barrier();
}

}  // namespace

#define PROBE(name, ...)                                                                                               \
    extern "C" __attribute__((visibility("default"))) int name(const Arguments* arguments, const emulator::Grid* grid, \
                                                               const emulator::Range* ranges, std::int64_t num_ranges, \
                                                               emulator::Report* report) {                             \
        const auto kernel = [](const void* p) { (__VA_ARGS__)(*static_cast<const Arguments*>(p)); };                   \
        return !emulator::launch(kernel, arguments, *grid, kWarps, kSharedBytes, ranges, num_ranges, *report);         \
    }
