// A kernel as a library function, which takes its parameters, grid and accessible memory, and fills a report.
#pragma once

#include "machine.hpp"

#define FA_EMULATED(name, kernel, Params, num_warps, shared_bytes)                                                        \
    extern "C" __attribute__((visibility("default"))) int name(const fastattention::Params* params,                       \
                                                               const emulator::Grid* grid, const emulator::Range* ranges, \
                                                               std::int64_t num_ranges, emulator::Report* report) {       \
        const auto run = [](const void* p) { kernel(*static_cast<const fastattention::Params*>(p)); };                    \
        return !emulator::launch(run, params, *grid, num_warps, shared_bytes, ranges, num_ranges, *report);               \
    }
