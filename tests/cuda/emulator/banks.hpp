// Bank conflicts of shared memory. It has 32 banks of 4 bytes; in one wavefront each bank serves one word to any number of
// lanes. An access of a warp is served 128 bytes at a time: 32 lanes of 4 bytes, 16 of 8, or 8 of 16, each group in one
// wavefront when its words are in different banks.
//
// The n-th accesses of all lanes of a warp since its last collective count as one instruction. That is right unless lanes
// skip accesses and make others later: then the counts include accesses that did not happen together.
#pragma once

#include <cstdint>
#include <vector>

#pragma GCC visibility push(hidden)

namespace emulator {

struct Wavefronts {
    std::int64_t counted, ideal;
};

enum class Access : std::uint32_t { kNone, kLoad32, kLoad64, kLoad128, kStore32, kStore64, kStore128, kCopy128 };

// The wavefronts of accesses of `size` bytes by 32 lanes. active: bit i says whether lane i takes part.
Wavefronts wavefronts_of(const std::uint32_t (&addresses)[32], std::uint32_t active, std::uint32_t size);

// The accesses of a warp between two collectives.
class AccessLog {
public:
    void add(int lane, Access access, std::uint32_t address) {
        const int place = count_[lane]++;
        if (place == longest_) {
            ++longest_;
            if (entries_.size() < static_cast<std::size_t>(longest_) * 32) entries_.resize(entries_.size() * 2 + 32 * 32);
        }
        entries_[place * 32 + lane] = static_cast<std::uint32_t>(access) << 24 | address;
    }

    // Adds up the wavefronts and forgets the accesses.
    void count(Wavefronts& loads, Wavefronts& stores, Wavefronts& copies);

    void clear();

private:
    std::vector<std::uint32_t> entries_;  // [access][lane]: kind and address, 0 if there is none
    int count_[32] = {};
    int longest_ = 0;
};

}  // namespace emulator

#pragma GCC visibility pop
