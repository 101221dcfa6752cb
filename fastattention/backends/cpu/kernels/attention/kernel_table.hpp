// What forward.cpp and backward.cpp hand to the kernels of an instruction set, and the table through which they call them.
#pragma once

#include <cstddef>
#include <cstdint>

// Compiled for several instruction sets: an out-of-line copy of these functions could end up on a processor without them.
#define FA_HOST_DEVICE __attribute__((always_inline))
#include "../../../common/tile_range.hpp"
#include "attention/block_row.hpp"
#include "attention/params.h"
#include "common/dtype.h"

namespace fastattention {

// Rows of one head of keys or values of one sequence, wherever they lie.
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

    // How many of the n rows from `row` on lie stride_row apart.
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
    Rows k_scale, v_scale;  // of a quantized cache
    char* out;
    float* lse;             // null when not asked for
    const char* bias;       // null without
    const float* alibi;     // slopes of all heads, null without
    const uint8_t* blocks;  // of a block mask, null without
    int64_t cache_seqlen;   // tokens before the append, left padding included: the rotary position of query 0
    int64_t batch;
};

// A tile of query rows of one key head.
struct RowTile {
    static constexpr int64_t kAllHeads = -1;

    int64_t first;  // row, or token of the one head
    int64_t count;
    int64_t head;  // the only one, among those that share the key head; kAllHeads: row by row
};

// All calls share this view of the arguments.
struct Call {
    const FaAttentionParams* params;
    int64_t group_size;    // query heads that share a key head
    int64_t element_size;  // bytes of an element of q, k_new, v_new, out
    int64_t cache_element_size;  // of k and v
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

    // Tiles of these rows, at most `size` of them each. With a block mask a tile has tokens of one head, and of one row of
    // blocks, which `size` divides.
    FA_HOST_DEVICE int64_t num_tiles(const Sequence& s, int64_t size) const {
        return s.blocks ? group_size * tiles_of_head(s, size) : (rows(s) + size - 1) / size;
    }
    FA_HOST_DEVICE RowTile tile(const Sequence& s, int64_t index, int64_t size) const {
        const int64_t of_head = s.blocks ? tiles_of_head(s, size) : num_tiles(s, size);
        const int64_t first = index % of_head * size, last = s.blocks ? s.mask.seqlen_q : rows(s);
        return {first, last - first < size ? last - first : size, s.blocks ? index / of_head : RowTile::kAllHeads};
    }

    // What the block mask keeps for the row of blocks that has a token of a query head.
    FA_HOST_DEVICE BlockRow block_row(const Sequence& s, int64_t token, int64_t head) const {
        if (s.blocks == nullptr) return {};
        const FaAttentionParams& p = *params;
        return {s.blocks + head * p.block_stride_head + token / p.block_m * p.block_stride_row, p.block_stride_key,
                p.block_n};
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
    float* key_scales;  // of a quantized cache, or of keys in int8, one a key; zeros past the end
    float* value_scales;  // of a quantized cache
    float* key_mean;      // taken from keys in int8: (headdim), padded with zeros to a whole vector
};

// How an instruction set packs for a dtype and head dimension, in the units above.
struct PanelGeometry {
    int64_t panel;           // keys a panel holds; packing is done a panel at a time
    int64_t key_units;       // units of one key, and the one of a panel's first row if sums begin with that
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
    float* row_max;  // (rows), of a latent decode up to a multiple of kLatentRowStep
    float* row_sum;  // (rows)
    float* acc_o;    // (rows, headdim_v padded to the vector width)
};

// How an instruction set goes through a backward of a dtype and head dimension. A tile of rows meets a chunk of keys.
struct BackwardGeometry {
    int64_t tile_rows;       // of a tile, at most
    int64_t keys;            // of a chunk
    int64_t tile_floats;     // of a tile packed by pack_rows
    int64_t grad_q_floats;   // of a tile's gradient of q
    int64_t scratch_floats;  // working memory of a thread
};

// One key head of one sequence in a backward.
struct BackwardHead {
    int64_t sequence;
    int64_t kv_head;
    int64_t first_query, first_key;  // tokens of the sequences before it
    float* tiles;                    // packed queries and gradients of results, tile by tile
    float* grad_q;                   // not yet scaled, tile by tile
    float* grad_sinks;               // what each tile adds, (tiles, group_size); null without
    int32_t* turn;                   // of each tile: the chunk that adds to its gradient of q next
};

// Keys whose dropout is decided together (dropout.hpp).
constexpr int64_t kDropoutKeys = 64;

// Rows of a latent decode are processed in whole vectors: room for a multiple of the widest.
constexpr int64_t kLatentRowStep = 16;
// Heads that one call of decode_splits takes at most.
constexpr int64_t kMaxSplitHeads = 16;
// Their queries and their results take at most this many floats a row.
constexpr int64_t kMaxSplitFloats = 512 * kMaxSplitHeads;

// The kernels of an instruction set.
struct AttentionKernels {
    PanelGeometry (*panel_geometry)(const FaAttentionParams& params);
    void (*key_mean)(const Call& call, const HeadPanels& head);  // before the panels of keys in int8
    void (*pack_panel)(const Call& call, const HeadPanels& head, int64_t panel);
    void (*prefill_tile)(const Call& call, const HeadPanels& head, int64_t tile, float* scratch);

    int64_t (*decode_columns)(const FaAttentionParams& params);  // row length of DecodeSplit::acc_o
    // splits: the same keys of num_heads consecutive heads.
    void (*decode_splits)(const Call& call, const DecodeSplit* splits, int64_t num_heads);
    // One split of a head whose values are in its keys, for many rows; with working memory of latent_scratch floats.
    void (*decode_latent)(const Call& call, const DecodeSplit& split, float* scratch);
    int64_t (*latent_scratch)(const FaAttentionParams& params);
    // Merges the splits of one head, which lie `stride` apart.
    void (*decode_merge)(const Call& call, const DecodeSplit* splits, int64_t num_splits, int64_t stride);

    void (*append_token)(const Call& call, const Sequence& sequence, int64_t token);

    BackwardGeometry (*backward_geometry)(const FaAttentionParams& params);
    void (*pack_rows)(const Call& call, const FaGradients& gradients, const BackwardHead& head, int64_t tile);
    // The gradients of a chunk of keys, and its part of those of the queries.
    void (*backward_chunk)(const Call& call, const FaGradients& gradients, const BackwardHead& head, int64_t chunk,
                           float* scratch);
};

}  // namespace fastattention
