// The arguments of the kernels, passed by value. Python reads this header, and fills the fields by name.
// Pointers are to device memory. Strides are in elements, never bytes.
#pragma once

#include "integers.h"

namespace fastattention {

// Parameters of attention: forward.cuh, decode.cuh and combine.cuh.
struct AttentionParams {
    const uint16_t* q;  // (batch_size, seqlen_q, nheads, headdim), or (total_q, nheads, headdim) when varlen
    const void* k;      // (batch_size, seqlen_k, nheads_k, headdim), varlen, a cache, or pages of page_block_size tokens
    const void* v;
    uint16_t* out;      // shaped as q, with headdim_v
    float* lse;         // (batch_size, nheads, seqlen_q), or (nheads, total_q) when varlen; null when not asked for

    const int32_t* cu_seqlens_q;  // (batch_size + 1), null when sequences are equally long
    const int32_t* cu_seqlens_k;
    const int32_t* cache_seqlens;    // (batch_size), tokens before this call's append; null without a cache
    const int32_t* cache_batch_idx;  // (batch_size), row of the cache; null when sequence i has row i
    const int32_t* cache_leftpad;    // (batch_size), null if none
    const int32_t* block_table;      // (batch_size, pages of a sequence), null when not paged
    const float* alibi_slopes;       // null if none
    const float* sinks;              // (nheads), null if none
    const void* attn_bias;           // null if none

    const int64_t* dropout_seed;     // null if none
    const uint8_t* block_mask;       // (batch_size, nheads, blocks of queries, blocks of keys), 1 where kept; null if none
    const int32_t* tile_index;       // (batch_size, nheads, tiles of queries, tiles of keys): -1, or a tile of tile_bits
    const int64_t* tile_bits;        // (tiles, 64): by query, a bit for each of 64 keys, 1 where visible; null if none

    const float* k_scale;  // of a quantized cache, shaped as k without its last axis; of int8 keys: one per kKeysOfScale
    const float* v_scale;
    const float* q_scale;  // of int8 queries, shaped as lse
    const float* q_shift;  // products of queries with the mean of keys, which int8 products lack; null if not needed

    float* partial_out;    // (slots, partial_rows, headdim_v), see schedule.cuh
    float* partial_stats;  // (slots, partial_rows, 2): running maximum, sum
    int32_t* counters;     // (batch_size, num_units), zeros before and after the call; null where combine.cuh merges

    int64_t q_stride_batch, q_stride_head;
    int64_t k_stride_batch, k_stride_head;  // when paged, stride_batch is a page's
    int64_t v_stride_batch, v_stride_head;
    int64_t k_scale_stride_batch, k_scale_stride_row, k_scale_stride_head;
    int64_t v_scale_stride_batch, v_scale_stride_row, v_scale_stride_head;
    int64_t out_stride_batch, out_stride_head;
    int64_t lse_stride_batch, lse_stride_head;  // the latter is total_q when varlen
    int64_t bias_stride_batch, bias_stride_head, bias_stride_row, bias_stride_key;
    int64_t alibi_stride_batch;
    int64_t block_table_stride;
    int64_t block_stride_batch, block_stride_head, block_stride_row, block_stride_key;
    int64_t tile_stride_batch, tile_stride_head, tile_stride_row, tile_stride_key;
    int64_t report_at;  // address for report_length; 0 if there is none

    int32_t q_stride_row, k_stride_row, v_stride_row, out_stride_row;
    int32_t batch_size;
    int32_t seqlen_q, seqlen_k;  // of each sequence, or of the longest when varlen; for a cache its capacity
    int32_t seqlen_new;          // tokens that this call appended to the cache
    int32_t max_cache_seqlen;    // sequences with a longer cache have no room for the append: their results are NaN
    int32_t nheads;
    int32_t group_size;  // query heads that share a key head
    int32_t group_multiplier, group_shift;  // divide by group_size, see Divisor; the pairs below do the same
    int32_t headdim, headdim_v;
    int32_t page_block_size;
    int32_t page_multiplier, page_shift;
    int32_t window_left, window_right;  // keys visible on either side of the diagonal, -1 unlimited
    int32_t block_m, block_n;           // tokens of a block of the block mask: queries, keys
    int32_t bias_is_float;              // attn_bias is float32, otherwise it has the dtype of q
    int32_t num_m_tiles;                // tiles of query rows of the longest sequence
    int32_t heads_per_l2_wave;          // heads whose tiles run at about the same time, see find_work
    int32_t heads_before_last_wave;     // heads of whole such groups; tiles of all others run after them
    int32_t num_units;                  // tiles of query rows of all key heads, see schedule.cuh
    int32_t units_multiplier, units_shift;
    int32_t num_cta_groups;             // groups of CTAs that divide the keys of all sequences evenly
    int32_t cta_groups_multiplier, cta_groups_shift;
    int32_t num_splits;                 // parts that each sequence's keys are split into instead; 0 is off
    int32_t partial_rows;               // query rows of a partial result
    int32_t teams_of_row;               // half warps of combine.cuh that share the partial results of a row: 1, 4 or 16
    int32_t dropout_threshold;          // its upper half: the lowest random number (dropout.cuh) of weights that are kept
    float softmax_scale;
    float softcap;  // 0 is off
    float dropout_factor;  // multiplies the weights that are kept
};

// Parameters of delta.cuh and backward.cuh. Gradients, and the gradient of out, are contiguous.
struct BackwardParams {
    AttentionParams call;  // arguments and results of the forward
    const uint16_t* grad_out;  // shaped as out
    const float* grad_lse;     // shaped as lse; null if none
    float* stats;              // (3, num_rows), each row shaped as lse: see delta.cuh
    float* query_sums;         // query_sums.cuh; null where kernels add nothing there
    uint16_t* grad_q;
    uint16_t* grad_k;
    uint16_t* grad_v;
    int64_t num_rows;     // elements of lse
    float exponents_of_lse;  // factor from lse to exponents
};

// Parameters of quantize_rows.cuh. What it writes is contiguous.
struct QuantizeParams {
    const uint16_t* q;  // as in AttentionParams
    const uint16_t* k;
    const int32_t* cu_seqlens_q;  // null when sequences are equally long
    const int32_t* cu_seqlens_k;
    float* sums;        // (batch_size, num_chunks, nheads_k, columns): sums over a chunk of keys, times kShare
    uint8_t* q_stored;  // (tokens of all sequences, nheads, columns)
    uint8_t* k_stored;
    float* q_scale;  // (batch_size, nheads, seqlen_q), varlen (nheads, total_q)
    float* q_shift;  // shaped as q_scale; null if not needed
    float* k_scale;  // (batch_size, nheads_k, k_tiles)

    int64_t q_stride_batch, q_stride_row, q_stride_head;
    int64_t k_stride_batch, k_stride_row, k_stride_head;

    int32_t batch_size, seqlen_q, seqlen_k;  // lengths of the longest sequence
    int32_t total_q;                         // tokens of a row of q_scale: seqlen_q unless varlen
    int32_t nheads, nheads_k;
    int32_t headdim;     // of q and k
    int32_t columns;     // of stored rows, a multiple of 16; those beyond headdim are 0
    int32_t num_chunks;  // chunks of keys of the longest sequence
    int32_t q_tiles, k_tiles;  // tiles of rows of the longest sequence
};

// Parameters of append.cuh.
struct AppendParams {
    const uint16_t* k_new;  // (batch_size, seqlen_new, nheads_k, headdim)
    const uint16_t* v_new;
    void* k;  // the cache and its scales, as in AttentionParams
    void* v;
    float* k_scale;
    float* v_scale;
    const uint16_t* q;     // (batch_size, seqlen_q, nheads, headdim), null when it is not to be rotated
    uint16_t* q_rotated;   // shaped as q, contiguous
    const uint16_t* rotary_cos;  // (positions, rotary_dim / 2), null if none
    const uint16_t* rotary_sin;

    const int32_t* cache_seqlens;
    const int32_t* cache_batch_idx;
    const int32_t* cache_leftpad;
    const int32_t* block_table;

    int64_t k_new_stride_batch, k_new_stride_row, k_new_stride_head;
    int64_t v_new_stride_batch, v_new_stride_row, v_new_stride_head;
    int64_t k_stride_batch, k_stride_row, k_stride_head;  // stride_batch: of a row of the cache, or of a page
    int64_t v_stride_batch, v_stride_row, v_stride_head;
    int64_t k_scale_stride_batch, k_scale_stride_row, k_scale_stride_head;
    int64_t v_scale_stride_batch, v_scale_stride_row, v_scale_stride_head;
    int64_t q_stride_batch, q_stride_row, q_stride_head;
    int64_t block_table_stride;

    int32_t batch_size, seqlen_q, seqlen_new;
    int32_t nheads, nheads_k, headdim, headdim_v;
    int32_t page_block_size;
    int32_t max_cache_seqlen;
    int32_t rotary_dim;
    int32_t rotary_interleaved;
    int32_t rotates_by_token;  // rotates query i by position cache_seqlens + i, otherwise all by cache_seqlens
};

// Parameters of merge.cuh. A launch takes up to kMostParts parts; it reads the first num_parts.
constexpr int kMostParts = 8;

struct MergeParams {
    const void* outs[kMostParts];   // (batch_size, tokens, nheads, headdim_v); batch_size is 1 when varlen
    const float* lses[kMostParts];  // (batch_size, nheads, tokens)
    void* out;                      // shaped as a part, contiguous
    float* lse;

    int64_t outs_stride_batch[kMostParts], outs_stride_row[kMostParts], outs_stride_head[kMostParts];
    int64_t lses_stride_batch[kMostParts], lses_stride_head[kMostParts], lses_stride_row[kMostParts];

    int32_t num_parts;
    int32_t batch_size, tokens, nheads, headdim_v;
};

}  // namespace fastattention
