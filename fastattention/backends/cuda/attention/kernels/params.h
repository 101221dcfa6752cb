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
    uint16_t* out;      // as q, with headdim_v
    float* lse;         // (batch_size, nheads, seqlen_q), or (nheads, total_q) when varlen; null when not asked for

    const int32_t* cu_seqlens_q;  // (batch_size + 1), null when sequences are equally long
    const int32_t* cu_seqlens_k;
    const int32_t* cache_seqlens;    // (batch_size), tokens before this call's append; null without a cache
    const int32_t* cache_batch_idx;  // (batch_size), row of the cache, null when it is the sequence's own
    const int32_t* cache_leftpad;    // (batch_size), null without
    const int32_t* block_table;      // (batch_size, pages of a sequence), null when not paged
    const float* alibi_slopes;       // null without
    const float* sinks;              // (nheads), null without
    const void* attn_bias;           // null without

    const int64_t* dropout_seed;     // null without
    const uint8_t* block_mask;       // (batch_size, nheads, blocks of queries, blocks of keys), 1 where kept; null without

    const float* k_scale;  // of a quantized cache, as k without its last axis; of keys multiplied in int8, one a group
    const float* v_scale;
    const float* q_scale;  // of queries multiplied in int8, as lse
    const float* q_shift;  // what their products lack: those with the mean of keys; null where nobody asks

    float* partial_out;    // (slots, partial_rows, headdim_v), see schedule.cuh
    float* partial_stats;  // (slots, partial_rows, 2): running maximum, sum
    int32_t* counters;     // (batch_size, num_units), zeros, and zeros again in the end; null where combine.cuh merges

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

    int32_t q_stride_row, k_stride_row, v_stride_row, out_stride_row;
    int32_t batch_size;
    int32_t seqlen_q, seqlen_k;  // of every sequence, the longest when varlen, the capacity of a cache
    int32_t seqlen_new;          // tokens that this call appended to the cache
    int32_t max_cache_seqlen;    // sequences with a longer cache have no room for the append: their results are NaN
    int32_t nheads;
    int32_t group_size;  // query heads that share a key head
    int32_t group_multiplier, group_shift;  // divide by group_size, see Divisor; likewise below
    int32_t headdim, headdim_v;
    int32_t page_block_size;
    int32_t page_multiplier, page_shift;
    int32_t window_left, window_right;  // keys visible on either side of the diagonal, -1 unlimited
    int32_t block_m, block_n;           // tokens of a block of the block mask: queries, keys
    int32_t bias_is_float;              // otherwise it has the dtype of q
    int32_t num_m_tiles;                // of the longest sequence
    int32_t heads_per_l2_wave;          // heads whose tiles run at about the same time, see find_work
    int32_t num_units;                  // tiles of query rows of all key heads, see schedule.cuh
    int32_t units_multiplier, units_shift;
    int32_t num_cta_groups;             // of CTAs, that share the keys of all sequences evenly
    int32_t cta_groups_multiplier, cta_groups_shift;
    int32_t num_splits;                 // parts that the keys of each sequence are split into instead, 0 is off
    int32_t partial_rows;               // query rows of a partial result
    int32_t teams_of_row;               // half warps of combine.cuh that share the partial results of a row: 1, 4 or 16
    int32_t dropout_threshold;          // of 32 bits without a sign: words of dropout.cuh that are at least this are kept
    float softmax_scale;
    float softcap;  // 0 is off
    float dropout_factor;  // of weights that are kept
};

// Parameters of delta.cuh and backward.cuh. Gradients, and the gradient of out, are contiguous.
struct BackwardParams {
    AttentionParams call;  // of the forward, with its results
    const uint16_t* grad_out;  // as out
    const float* grad_lse;     // as lse, null without
    float* stats;              // (3, num_rows), each as lse: see delta.cuh
    uint16_t* grad_q;
    uint16_t* grad_k;
    uint16_t* grad_v;
    int64_t num_rows;     // of lse
    float exponents_of_lse;  // what lse is multiplied with
};

// Parameters of quantize_rows.cuh. What it writes is contiguous.
struct QuantizeParams {
    const uint16_t* q;  // as in AttentionParams
    const uint16_t* k;
    const int32_t* cu_seqlens_q;  // null when sequences are equally long
    const int32_t* cu_seqlens_k;
    float* sums;        // (batch_size, num_chunks, nheads_k, columns): of a chunk of keys, times kShare
    uint8_t* q_stored;  // (tokens of all sequences, nheads, columns)
    uint8_t* k_stored;
    float* q_scale;  // (batch_size, nheads, seqlen_q), varlen (nheads, total_q)
    float* q_shift;  // likewise, null where nobody asks
    float* k_scale;  // (batch_size, nheads_k, k_tiles)

    int64_t q_stride_batch, q_stride_row, q_stride_head;
    int64_t k_stride_batch, k_stride_row, k_stride_head;

    int32_t batch_size, seqlen_q, seqlen_k;  // of the longest sequence
    int32_t total_q;                         // tokens of a row of q_scale: seqlen_q unless varlen
    int32_t nheads, nheads_k;
    int32_t headdim;     // of q and k
    int32_t columns;     // of what is stored, a multiple of 16: those beyond headdim are 0
    int32_t num_chunks;  // of keys of the longest sequence
    int32_t q_tiles, k_tiles;  // of rows of the longest sequence
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
    uint16_t* q_rotated;   // the same, contiguous
    const uint16_t* rotary_cos;  // (positions, rotary_dim / 2), null without
    const uint16_t* rotary_sin;

    const int32_t* cache_seqlens;
    const int32_t* cache_batch_idx;
    const int32_t* cache_leftpad;
    const int32_t* block_table;

    int64_t k_new_stride_batch, k_new_stride_row, k_new_stride_head;
    int64_t v_new_stride_batch, v_new_stride_row, v_new_stride_head;
    int64_t k_stride_batch, k_stride_row, k_stride_head;  // batch: of a row of the cache or of a page
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
    int32_t rotates_by_token;  // query i by position cache_seqlens + i, otherwise all by cache_seqlens
};

// Parameters of merge.cuh. A launch takes up to kMostParts parts; it reads the first num_parts.
constexpr int kMostParts = 8;

struct MergeParams {
    const void* outs[kMostParts];   // (batch_size, tokens, nheads, headdim_v); batch_size is 1 when varlen
    const float* lses[kMostParts];  // (batch_size, nheads, tokens)
    void* out;                      // as a part, contiguous
    float* lse;

    int64_t outs_stride_batch[kMostParts], outs_stride_row[kMostParts], outs_stride_head[kMostParts];
    int64_t lses_stride_batch[kMostParts], lses_stride_head[kMostParts], lses_stride_row[kMostParts];

    int32_t num_parts;
    int32_t batch_size, tokens, nheads, headdim_v;
};

}  // namespace fastattention
