// Tiles of 16-bit biases in shared memory: each warp copies those of its scores while keys or values are copied. Read from
// global memory, the biases of a lane would lie in as many lines of the cache as it has rows. This compiles to nothing where
// biases are not staged.
#pragma once

#include "work.cuh"

namespace fastattention {

// A warp's tile: a row for each query, or the same row for all.
struct StagedBiases {
    uint32_t at;  // in shared memory
    int pitch;    // bytes between rows, which is 0 where all rows are the same
    bool exist;

    // The biases of two neighbouring keys.
    FA_DEVICE uint32_t pair(int query, int key) const { return load_shared_32(at + query * pitch + key * 2); }

    // pairs[step][n][which]: the biases of a lane's scores, as they lie in fragments of 16 rows. kRowsAreKeys: rows of scores
    // are keys, and their columns queries.
    template <bool kRowsAreKeys, int kSteps, int kTiles>
    FA_DEVICE void load(uint32_t (&pairs)[kSteps][kTiles][2]) const {
        static_assert(kTiles % 2 == 0, "four fragments are loaded at once");
        const int lane = lane_index(), down = lane / 8 % 2 * 8, right = lane / 16 * 8;
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
#pragma unroll
            for (int n = 0; n < kTiles; n += 2) {
                uint32_t x[4];
                if constexpr (kRowsAreKeys) {
                    load_matrices_transposed(x, at + (n * 8 + right + lane % 8) * pitch + (step * 16 + down) * 2);
                } else {
                    load_matrices(x, at + (step * 16 + down + lane % 8) * pitch + (n * 8 + right) * 2);
                }
                pairs[step][n][0] = x[0];
                pairs[step][n][1] = x[1];
                pairs[step][n + 1][0] = x[2];
                pairs[step][n + 1][1] = x[3];
            }
    }
};

// kQueries, kKeys: of the scores of a warp, of which a CTA has kNumWarps.
template <class Arch, int kQueries, int kKeys, int kNumWarps>
class BiasTiles {
    using Copy = TileCopy<Arch, OneWarp, uint16_t, false, kQueries, kKeys>;
    static constexpr int kWarpBytes = kQueries * Copy::kPitch;

public:
    static constexpr int kBytes = kStagesBias ? kNumWarps * kWarpBytes : 0;

    // warp: which of those that share out the scores.
    FA_DEVICE BiasTiles(const SourceRows<uint16_t, false>& from, int warp) : from_(from), warp_offset_(warp * kWarpBytes) {}

    // tiles: where those of the CTA are.
    FA_DEVICE StagedBiases of_warp(uint32_t tiles) const {
        if constexpr (!kStagesBias) return {};
        return {tiles + warp_offset_, from_.stride_row == 0 ? 0 : Copy::kPitch, from_.base != nullptr};
    }

    // Starts to copy the tile that begins with this query and this key, unless biases lie so that they cannot be copied.
    FA_DEVICE void begin(int query, int key, uint32_t tiles) const {
        if constexpr (kStagesBias) {
            if (from_.base == nullptr) return;
            SourceRows<uint16_t, false> tile = from_;
            tile.base += key;
            tile.num_columns -= key;
            if (tile.stride_row == 0) tile.num_rows = smaller(tile.num_rows, query + 1);  // the others are the same
            Copy(tile).begin(query, tiles + warp_offset_);
        }
    }

private:
    const SourceRows<uint16_t, false> from_;
    const uint32_t warp_offset_;
};

}  // namespace fastattention
