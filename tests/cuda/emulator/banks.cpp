#include "banks.hpp"

#include <algorithm>

namespace emulator {

namespace {

// Lanes first ... last - 1, which are served together. A unit is what a lane accesses: it and those at a distance of 128
// bytes are in the same banks.
int group_wavefronts(const std::uint32_t (&addresses)[32], std::uint32_t active, std::uint32_t size, int first, int last) {
    const std::uint32_t num_banks = 128 / size;
    std::uint32_t units[32][32];  // that a bank must serve
    int served[32], most = 0;
    std::fill(served, served + num_banks, 0);
    for (int lane = first; lane < last; ++lane) {
        if (!(active >> lane & 1)) continue;
        const std::uint32_t unit = addresses[lane] / size, bank = unit % num_banks;
        std::uint32_t* end = units[bank] + served[bank];
        if (std::find(units[bank], end, unit) != end) continue;
        *end = unit;
        most = std::max(most, ++served[bank]);
    }
    return most;
}

std::uint32_t size_of(Access access) {
    switch (access) {
        case Access::kLoad32:
        case Access::kStore32: return 4;
        case Access::kLoad64: return 8;
        default: return 16;
    }
}

}  // namespace

Wavefronts wavefronts_of(const std::uint32_t (&addresses)[32], std::uint32_t active, std::uint32_t size) {
    const int lanes = static_cast<int>(128 / size);
    Wavefronts result{0, 0};
    for (int first = 0; first < 32; first += lanes) {
        const int needed = group_wavefronts(addresses, active, size, first, first + lanes);
        result.counted += needed;
        result.ideal += needed > 0;
    }
    return result;
}

void AccessLog::count(Wavefronts& loads, Wavefronts& stores, Wavefronts& copies) {
    for (int place = 0; place < longest_; ++place) {
        const std::uint32_t* entries = &entries_[place * 32];
        std::uint32_t addresses[32], lanes_of[8] = {};
        for (int lane = 0; lane < 32; ++lane) {
            addresses[lane] = entries[lane] & 0xffffff;
            lanes_of[entries[lane] >> 24] |= 1u << lane;
        }
        for (std::uint32_t kind = 1; kind < 8; ++kind) {
            if (lanes_of[kind] == 0) continue;
            const Access access = static_cast<Access>(kind);
            const Wavefronts needed = wavefronts_of(addresses, lanes_of[kind], size_of(access));
            Wavefronts& sum = access <= Access::kLoad128 ? loads : access <= Access::kStore128 ? stores : copies;
            sum.counted += needed.counted;
            sum.ideal += needed.ideal;
        }
    }
    clear();
}

void AccessLog::clear() {
    std::fill(entries_.begin(), entries_.begin() + longest_ * 32, 0);
    std::fill(count_, count_ + 32, 0);
    longest_ = 0;
}

}  // namespace emulator
