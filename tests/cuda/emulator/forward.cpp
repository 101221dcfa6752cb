// The library of one variant of the forward kernel: the macros of a KernelConfig say which.
#include "forward.cuh"

#include "machine.hpp"

extern "C" __attribute__((visibility("default"))) int fastattention_emulate(
    const fastattention::ForwardParams* params, std::int64_t num_blocks, const emulator::Range* ranges,
    std::int64_t num_ranges, emulator::Report* report) {
    const auto kernel = [](const void* p) { fastattention_forward(*static_cast<const fastattention::ForwardParams*>(p)); };
    return !emulator::launch(kernel, params, num_blocks, fastattention::kWarps, fastattention::kSharedMemory, ranges,
                             num_ranges, *report);
}
