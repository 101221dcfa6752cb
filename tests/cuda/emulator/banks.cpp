#include "banks.hpp"

#include <algorithm>

namespace emulator {

namespace {

// The wavefronts of a group of lanes that is served together, starting at `first`. A unit is what a lane accesses. Units at
// a distance of 128 bytes are in the same banks, so a unit has kBanks places.
template <std::uint32_t kSize>
int group_wavefronts(const std::uint32_t (&addresses)[32], std::uint32_t active, int first) {
    constexpr std::uint32_t kBanks = 128 / kSize;
    std::uint32_t units[kBanks][kBanks];  // the units that a bank must serve
    int served[kBanks] = {}, most = 0;
    for (int lane = first; lane < first + static_cast<int>(kBanks); ++lane) {
        if (!(active >> lane & 1)) continue;
        const std::uint32_t unit = addresses[lane] / kSize, bank = unit % kBanks;
        std::uint32_t* end = units[bank] + served[bank];
        if (std::find(units[bank], end, unit) != end) continue;
        *end = unit;
        most = std::max(most, ++served[bank]);
    }
    return most;
}

template <std::uint32_t kSize>
Wavefronts count_wavefronts(const std::uint32_t (&addresses)[32], std::uint32_t active) {
    constexpr int kLanes = 128 / kSize;
    Wavefronts result{0, 0};
    for (int first = 0; first < 32; first += kLanes) {
        const int needed = group_wavefronts<kSize>(addresses, active, first);
        result.counted += needed;
        result.ideal += needed > 0;
    }
    return result;
}

std::uint32_t size_of(Access access) {
    switch (access) {
        case Access::kLoad32:
        case Access::kStore32: return 4;
        case Access::kLoad64:
        case Access::kStore64: return 8;
        default: return 16;
    }
}

}  // namespace

Wavefronts wavefronts_of(const std::uint32_t (&addresses)[32], std::uint32_t active, std::uint32_t size) {
    switch (size) {
        case 4: return count_wavefronts<4>(addresses, active);
        case 8: return count_wavefronts<8>(addresses, active);
        default: return count_wavefronts<16>(addresses, active);
    }
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
