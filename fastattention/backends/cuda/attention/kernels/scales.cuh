// Scales of a quantized cache: a key's scale multiplies its scores, a value's scale its probabilities. This compiles to
// nothing in kernels for other caches.
#pragma once

#include "probability_exchange.cuh"
#include "results.cuh"

namespace fastattention {

// Copies the scales of keys and values, tile by tile.
template <class Arch, class Team, bool kIsQuantized = kQuantized>
class TileScales {
public:
    static constexpr int kBytes = 0;

    FA_DEVICE explicit TileScales(const Sources&) {}
    FA_DEVICE void look_up(int) {}
    FA_DEVICE void begin(int, uint32_t) {}
    FA_DEVICE void finish(uint32_t) const {}
};

template <class Arch, class Team>
class TileScales<Arch, Team, true> {
    using Copy = ScaleCopy<Arch, Team, kPaged, kTileN, kLooksAhead>;

public:
    static constexpr int kBytes = 2 * Copy::kBytes;

    FA_DEVICE explicit TileScales(const Sources& from) : k_copy_(from.k_scale), v_copy_(from.v_scale) {}
    FA_DEVICE void look_up(int key) {
        k_copy_.look_up(key);
        v_copy_.look_up(key);
    }
    FA_DEVICE void begin(int key, uint32_t to) {
        k_copy_.begin(key, to);
        v_copy_.begin(key, to + Copy::kBytes);
    }
    FA_DEVICE void finish(uint32_t to) const {
        k_copy_.finish(to);
        v_copy_.finish(to + Copy::kBytes);
    }

private:
    Copy k_copy_, v_copy_;
};

// The scales of the keys that a lane has scores of.
template <class Arch, bool kIsQuantized = kQuantized>
struct ScalesOfLane {
    FA_DEVICE explicit ScalesOfLane(uint32_t) {}
    FA_DEVICE float scaled_score(float s, int, int) const { return s; }
    FA_DEVICE float weight(float p, int, int) const { return p; }
    FA_DEVICE float log2_of_weight(int, int) const { return 0.0f; }
};

template <class Arch>
struct ScalesOfLane<Arch, true> {
    // from: where TileScales has copied them.
    FA_DEVICE explicit ScalesOfLane(uint32_t from) {
#pragma unroll
        for (int n = 0; n < kWarpKeys / 8; ++n)
#pragma unroll
            for (int i = 0; i < Arch::kElements; ++i)
                if (Arch::row_of_element(i) == 0) {
                    const uint32_t at = from + (first_warp_key() + Arch::score_column(n, i)) * 4;
                    k_[n][Arch::column_of_element(i)] = as_float(load_shared_32(at)) * kStoredFactor;
                    v_[n][Arch::column_of_element(i)] = as_float(load_shared_32(at + kTileN * 4)) * kStoredFactor;
                }
    }

    // Scales the score in element i of accumulator n.
    FA_DEVICE float scaled_score(float s, int n, int i) const { return s * k_[n][Arch::column_of_element(i)]; }
    // The factor of the stored value. It is rounded to 16 bits, so it, and not the probability, must not overflow.
    FA_DEVICE float weight(float p, int n, int i) const { return p * v_[n][Arch::column_of_element(i)]; }
    // The log of a value's scale. The bound is so low that smaller values may be lost.
    FA_DEVICE float log2_of_weight(int n, int i) const {
        constexpr float kSmallest = 5.9604645e-8f;  // 2^-24
        return log2_approximate(larger(v_[n][Arch::column_of_element(i)], kSmallest));
    }

private:
    float k_[kWarpKeys / 8][Arch::kElements / 2], v_[kWarpKeys / 8][Arch::kElements / 2];
};

}  // namespace fastattention
