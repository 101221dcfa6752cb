// Finds which keys a query sees, and which tiles need no mask or no work at all: the tile classification of the paper's
// tiling-mask, for causal and window masks alike. Every kernel uses it. It is plain C++ without includes, so that device
// compilers accept it. tile_range.py is its counterpart for planners in Python, and a test compares the two.
#pragma once

#ifndef FA_HOST_DEVICE
#define FA_HOST_DEVICE
#endif

namespace fastattention {

enum class TileKind : int {
    kSkipped = 0,  // no query of the tile sees any of its keys
    kPartial = 1,  // the mask must be applied
    kFull = 2,     // every query sees every key
};

// The keys that a run of neighbouring queries sees: some of them see keys from seen_begin to seen_end, all of them see keys
// from full_begin to full_end. For kernels that classify one tile of keys after the other.
template <class Integer>
struct RowsRange {
    Integer seen_begin, seen_end;
    Integer full_begin, full_end;

    FA_HOST_DEVICE TileKind classify(Integer first_k, Integer last_k) const {
        if (seen_end <= first_k || seen_begin > last_k) return TileKind::kSkipped;
        return full_begin <= first_k && full_end > last_k ? TileKind::kFull : TileKind::kPartial;
    }
};

// The band of keys around the diagonal that is aligned to the bottom right corner of the score matrix: query i sees keys
// i + seqlen_k - seqlen_q - left ... i + seqlen_k - seqlen_q + right, where -1 is unlimited. The band moves right from row
// to row, so the first and last row of a tile decide for all of its rows. GPU kernels count in int to save registers.
template <class Integer>
struct BasicTileRange {
    Integer seqlen_q;
    Integer seqlen_k;
    Integer left;
    Integer right;

    FA_HOST_DEVICE Integer clamp(Integer key) const { return key < 0 ? 0 : (key > seqlen_k ? seqlen_k : key); }

    // First key that query i sees, if it sees any.
    FA_HOST_DEVICE Integer row_begin(Integer i) const { return left < 0 ? 0 : clamp(i + seqlen_k - seqlen_q - left); }

    // One past the last key that query i sees; at most row_begin if it sees none.
    FA_HOST_DEVICE Integer row_end(Integer i) const {
        return right < 0 ? seqlen_k : clamp(i + seqlen_k - seqlen_q + right + 1);
    }

    // The tile of queries first_q..last_q and keys first_k..last_k, all inclusive.
    FA_HOST_DEVICE TileKind classify(Integer first_q, Integer last_q, Integer first_k, Integer last_k) const {
        return rows(first_q, last_q).classify(first_k, last_k);
    }

    // The queries first_q..last_q, both inclusive.
    FA_HOST_DEVICE RowsRange<Integer> rows(Integer first_q, Integer last_q) const {
        return {row_begin(first_q), row_end(last_q), row_begin(last_q), row_end(first_q)};
    }
};

using TileRange = BasicTileRange<long long>;

}  // namespace fastattention
