// Warps that divide the columns of v have the same rows. Each scores a part of a tile's keys, and needs the probabilities of
// all. They exchange them through shared memory, as operands of the second product.
#pragma once

#include "shared_tile.cuh"

namespace fastattention {

FA_DEVICE int column_warp() { return kColumnWarps == 1 ? 0 : warp_index() % kColumnWarps; }
FA_DEVICE int first_warp_key() { return column_warp() * kWarpKeys; }
FA_DEVICE int first_warp_column() { return column_warp() * kWarpColumns; }

constexpr int kProbabilityPitch = pitch_of<2>(kTileN);
// Holds probabilities, and for each row a maximum or a sum from each of these warps.
constexpr int kExchangeBytes = kColumnWarps == 1 ? 0 : kTileM * (kProbabilityPitch + kColumnWarps * 4);

// Exchanges one value per row among these warps.
class RowExchange {
public:
    FA_DEVICE explicit RowExchange(uint32_t exchange)
        : at_(exchange + kTileM * kProbabilityPitch), own_(at_ + column_warp() * kTileM * 4) {}

    FA_DEVICE void leave(int row, float x) const { store_shared_32(own_ + row * 4, as_bits(x)); }

    template <class Combine>
    FA_DEVICE float combined(int row, Combine combine) const {
        float x = as_float(load_shared_32(at_ + row * 4));
#pragma unroll
        for (int warp = 1; warp < kColumnWarps; ++warp)
            x = combine(x, as_float(load_shared_32(at_ + (warp * kTileM + row) * 4)));
        return x;
    }

private:
    uint32_t at_, own_;
};

}  // namespace fastattention
