// The arguments that forward.cpp and backward.cpp pass to the kernels of an instruction set, and the table of these kernels.
#pragma once

#include <cstddef>
#include <cstdint>

// This is compiled for several instruction sets: a processor could run an out-of-line copy with instructions that it lacks.
#define FA_HOST_DEVICE __attribute__((always_inline))
#include "../../../common/tile_range.hpp"
#include "attention/block_row.hpp"
#include "attention/params.h"
#include "common/dtype.h"

namespace fastattention {

// Rows of keys or values of one head of one sequence, paged or not.
struct Rows {
    char* base;            // row 0, or page 0 when paged
    int64_t stride_row;    // in bytes
    const int32_t* pages;  // null when the rows are equally spaced
    int64_t page_size;     // tokens
    int64_t stride_page;   // in bytes
    int64_t first;         // cache position of row 0 when paged

    FA_HOST_DEVICE char* operator()(int64_t row) const {
        char* address;
        addresses(row, 1, &address);
        return address;
    }

    // Addresses of rows row ... row + n - 1.
    FA_HOST_DEVICE void addresses(int64_t row, int64_t n, char** to) const {
        if (pages == nullptr) {
            for (int64_t i = 0; i < n; ++i) to[i] = base + (row + i) * stride_row;
            return;
        }
        int64_t page = (first + row) / page_size, slot = (first + row) % page_size;
        for (int64_t i = 0; i < n; ++page, slot = 0) {
            char* at = base + pages[page] * stride_page + slot * stride_row;
            for (; slot < page_size && i < n; ++slot, ++i, at += stride_row) to[i] = at;
        }
    }

    // How many of the n rows from `row` on are stride_row apart.
    FA_HOST_DEVICE int64_t equally_spaced(int64_t row, int64_t n) const {
        if (pages == nullptr) return n;
        const int64_t left = page_size - (first + row) % page_size;
        return left < n ? left : n;
    }

    // The same rows of another head, `offset` bytes further on.
    FA_HOST_DEVICE Rows shifted(int64_t offset) const {
        Rows other = *this;
        other.base += offset;
        return other;
    }
};

// Whether values are the first columns of the keys, in the same memory.
FA_HOST_DEVICE inline bool values_in_keys(const FaAttentionParams& p) {
    return p.k == p.v && p.headdim_v <= p.headdim && p.panel_size == 0 && p.k_stride_batch == p.v_stride_batch &&
           p.k_stride_row == p.v_stride_row && (p.nheads_k == 1 || p.k_stride_head == p.v_stride_head);
}

FA_HOST_DEVICE inline bool is_quantized(const FaAttentionParams& p) { return p.k_scale != nullptr; }

// Whether queries and keys are multiplied in int8.
FA_HOST_DEVICE inline bool multiplies_int8(const FaAttentionParams& p) { return p.qk_dtype == FA_INT8; }

// One sequence of the batch. Pointers are to its first query token and its head 0; the strides are in Call's params.
struct Sequence {
    TileRange mask;  // also holds seqlen_q and seqlen_k, the keys after an append
    const char* q;
    Rows k, v;
    Rows k_scale, v_scale;  // only of a quantized cache
    char* out;
    float* lse;             // null when not asked for
    const char* bias;       // null if none
    const float* alibi;     // slopes of all heads, null if none
    const uint8_t* blocks;  // flags of a block mask, null if none
    const int32_t* tiles;   // tile_index, null if none
    int64_t cache_seqlen;   // tokens before the append, left padding included: the rotary position of query 0
    int64_t batch;
};

// A tile of query rows of one key head.
struct RowTile {
    static constexpr int64_t kAllHeads = -1;

    int64_t first;  // its first row, or its first token if it has one head
    int64_t count;
    int64_t head;  // its only head, among those that share the key head; kAllHeads: rows of all of them
};

// The arguments of a call, as all kernels see them.
struct Call {
    const FaAttentionParams* params;
    int64_t group_size;    // query heads that share a key head
    int64_t element_size;  // bytes of an element of q, k_new, v_new, out
    int64_t cache_element_size;  // bytes of an element of k and v
    const Sequence* sequences;

    FA_HOST_DEVICE Rows keys(const Sequence& s, int64_t kv_head) const {
        return s.k.shifted(kv_head * params->k_stride_head * cache_element_size);
    }
    FA_HOST_DEVICE Rows values(const Sequence& s, int64_t kv_head) const {
        return s.v.shifted(kv_head * params->v_stride_head * cache_element_size);
    }
    FA_HOST_DEVICE Rows key_scales(const Sequence& s, int64_t kv_head) const {
        return s.k_scale.shifted(kv_head * params->k_scale_stride_head * static_cast<int64_t>(sizeof(float)));
    }
    FA_HOST_DEVICE Rows value_scales(const Sequence& s, int64_t kv_head) const {
        return s.v_scale.shifted(kv_head * params->v_scale_stride_head * static_cast<int64_t>(sizeof(float)));
    }

    // A row is one query token of one query head. Rows of the heads that share a key head are processed together: row r
    // of a group is token r / group_size of head kv_head * group_size + r % group_size.
    FA_HOST_DEVICE int64_t rows(const Sequence& s) const { return s.mask.seqlen_q * group_size; }

    // Tiles of at most `size` rows each. With a block mask a tile has tokens of one head and of one row of blocks, whose
    // length is a multiple of `size`.
    FA_HOST_DEVICE int64_t num_tiles(const Sequence& s, int64_t size) const {
        return s.blocks ? group_size * tiles_of_head(s, size) : (rows(s) + size - 1) / size;
    }
    FA_HOST_DEVICE RowTile tile(const Sequence& s, int64_t index, int64_t size) const {
        const int64_t of_head = s.blocks ? tiles_of_head(s, size) : num_tiles(s, size);
        const int64_t first = index % of_head * size, last = s.blocks ? s.mask.seqlen_q : rows(s);
        return {first, last - first < size ? last - first : size, s.blocks ? index / of_head : RowTile::kAllHeads};
    }

    // The blocks that the block mask keeps for a token of a query head.
    FA_HOST_DEVICE BlockRow block_row(const Sequence& s, int64_t token, int64_t head) const {
        if (s.blocks == nullptr) return {};
        const FaAttentionParams& p = *params;
        BlockRow row{s.blocks + head * p.block_stride_head + token / p.block_m * p.block_stride_row, p.block_stride_key,
                     p.block_n};
        if (s.tiles != nullptr) {
            row.tiles = s.tiles + head * p.tile_stride_head + token / kBlockStep * p.tile_stride_row;
            row.tile_stride = p.tile_stride_key;
            row.bits = p.tile_bits + token % kBlockStep;
        }
        return row;
    }

private:
    FA_HOST_DEVICE static int64_t tiles_of_head(const Sequence& s, int64_t size) {
        return (s.mask.seqlen_q + size - 1) / size;
    }
};

// Keys and values of one head of one sequence, repacked for the matrix products of prefill. A unit is 32 bits: one float,
// two adjacent bfloat16 (of a key's head dimension, or of two keys' values), or four int8 (of a key's).
struct HeadPanels {
    int64_t sequence;
    int64_t kv_head;
    float* keys;    // panels of `panel` keys: (panels, units of headdim, panel)
    float* values;  // (units of keys, PanelGeometry::value_stride)
    float* key_scales;  // of a quantized cache, or of keys in int8, one per key; zeros after the last key
    float* value_scales;  // of a quantized cache
    float* key_mean;      // subtracted from keys in int8: (headdim), padded with zeros to a whole vector
};

// How an instruction set packs for a dtype and head dimension, in the units above.
struct PanelGeometry {
    int64_t panel;           // keys of a panel; packing is done a panel at a time
    int64_t key_units;       // units of one key, plus one if a panel begins with a row of initial sums
    int64_t keys_per_unit;   // keys that share a unit of values
    int64_t value_columns;   // headdim_v padded
    int64_t value_stride;    // floats from one unit of values to the next
    int64_t tile_rows;       // query rows of a tile
    int64_t scratch_floats;  // working memory of a thread
};

// The partial result of one split of a decode: `rows` running maxima (in log2 units), sums and unnormalized outputs.
struct DecodeSplit {
    int64_t sequence;
    int64_t kv_head;
    int64_t key_begin, key_end;
    float* row_max;  // (rows), padded to a multiple of kLatentRowStep in a latent decode
    float* row_sum;  // (rows)
    float* acc_o;    // (rows, split_stride)
};

// Sizes of a backward for a dtype and head dimension. A tile of rows is multiplied with a chunk of keys.
struct BackwardGeometry {
    int64_t tile_rows;       // rows of a tile, at most
    int64_t keys;            // keys of a chunk
    int64_t tile_floats;     // floats of a tile packed by pack_rows
    int64_t grad_q_floats;   // floats of a tile's gradient of q
    int64_t scratch_floats;  // working memory of a thread
};

// One key head of one sequence in a backward.
struct BackwardHead {
    int64_t sequence;
    int64_t kv_head;
    int64_t first_query, first_key;  // tokens of the sequences before it
    float* tiles;                    // packed queries and gradients of results, tile by tile
    float* grad_q;                   // not yet scaled, tile by tile
    float* grad_sinks;               // sums of each tile, (tiles, group_size); null if none
    int32_t* turn;                   // by tile: the chunk that adds to its gradient of q next
};

// Keys whose dropout is decided together (dropout.hpp).
constexpr int64_t kDropoutKeys = 64;

// Rows of a latent decode are processed in whole vectors, and padded to a multiple of the widest vector.
constexpr int64_t kLatentRowStep = 16;
// The most heads of one call of decode_splits.
constexpr int64_t kMaxSplitHeads = 16;
// Queries and results of these heads take at most this many floats per row.
constexpr int64_t kMaxSplitFloats = 512 * kMaxSplitHeads;

// The kernels of an instruction set.
struct AttentionKernels {
    PanelGeometry (*panel_geometry)(const FaAttentionParams& params);
    void (*key_mean)(const Call& call, const HeadPanels& head);  // called before keys are packed in int8
    void (*pack_panel)(const Call& call, const HeadPanels& head, int64_t panel);
    void (*prefill_tile)(const Call& call, const HeadPanels& head, int64_t tile, float* scratch);

    int64_t (*split_stride)(const FaAttentionParams& params);  // from one row of DecodeSplit::acc_o to the next
    // splits: the same keys of num_heads consecutive heads.
    void (*decode_splits)(const Call& call, const DecodeSplit* splits, int64_t num_heads);
    // Decodes one split of a head whose values are in its keys, for many rows, with latent_scratch floats of working memory.
    void (*decode_latent)(const Call& call, const DecodeSplit& split, float* scratch);
    int64_t (*latent_scratch)(const FaAttentionParams& params);
    // Merges the splits of one head, which are `stride` apart.
    void (*decode_merge)(const Call& call, const DecodeSplit* splits, int64_t num_splits, int64_t stride);

    void (*append_token)(const Call& call, const Sequence& sequence, int64_t token);

    BackwardGeometry (*backward_geometry)(const FaAttentionParams& params);
    void (*pack_rows)(const Call& call, const FaGradients& gradients, const BackwardHead& head, int64_t tile);
    // Computes the gradients of a chunk of keys, and its part of the gradients of queries.
    void (*backward_chunk)(const Call& call, const FaGradients& gradients, const BackwardHead& head, int64_t chunk,
                           float* scratch);
};

}  // namespace fastattention
