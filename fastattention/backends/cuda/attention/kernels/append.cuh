// Appends new keys and values to a KV cache, keys rotated by their positions, and rotates queries. A warp processes one row,
// a token of a head. Sequences that would exceed the cache's capacity are skipped: attention makes their results NaN.
#pragma once

#include "cache.cuh"
#include "quantize.cuh"

namespace fastattention {

constexpr int kAppendWarps = Config::num_warps;  // per CTA
constexpr int kMostOfLane = Config::columns / 32;  // elements of a row that a lane holds

// One row: lane l holds columns l, l + 32, ...
struct Row {
    float x[kMostOfLane];
};

struct Source {
    const uint16_t* base;
    int64_t stride_batch, stride_row, stride_head;

    FA_DEVICE const uint16_t* row(int batch, int token, int head) const {
        return base + batch * stride_batch + token * stride_row + head * stride_head;
    }
};

class Append {
public:
    FA_DEVICE explicit Append(const AppendParams& p) : p_(p) {}

    // index: the row's index. Rows of k_new come first, then rows of v_new, then queries.
    FA_DEVICE void run(int64_t index) const {
        const int64_t tokens = static_cast<int64_t>(p_.batch_size) * p_.seqlen_new;
        if (index < tokens * p_.nheads_k) return append_key(index);
        index -= tokens * p_.nheads_k;
        if (index < tokens * p_.nheads_k) return append_value(index);
        index -= tokens * p_.nheads_k;
        if (p_.q != nullptr && index < static_cast<int64_t>(p_.batch_size) * p_.seqlen_q * p_.nheads) rotate_query(index);
    }

private:
    struct Place {
        int head, token, batch;
    };

    static FA_DEVICE Place place_of(int64_t index, int heads, int tokens) {
        const int64_t token = index / heads;
        return {static_cast<int>(index % heads), static_cast<int>(token % tokens), static_cast<int>(token / tokens)};
    }

    FA_DEVICE void append_key(int64_t index) const {
        const Place at = place_of(index, p_.nheads_k, p_.seqlen_new);
        if (!is_within_capacity(p_, at.batch)) return;
        const int position = p_.cache_seqlens[at.batch] + at.token;
        const Source from{p_.k_new, p_.k_new_stride_batch, p_.k_new_stride_row, p_.k_new_stride_head};
        const Row row = read_rotated(from.row(at.batch, at.token, at.head), position);
        const int64_t to = in_cache(at, position, p_.k_stride_batch, p_.k_stride_row, p_.k_stride_head);
        const int64_t scale_to =
            in_cache(at, position, p_.k_scale_stride_batch, p_.k_scale_stride_row, p_.k_scale_stride_head);
        write_cached(row, static_cast<CacheItem*>(p_.k) + to, p_.k_scale + scale_to, p_.headdim);
    }

    FA_DEVICE void append_value(int64_t index) const {
        const Place at = place_of(index, p_.nheads_k, p_.seqlen_new);
        if (!is_within_capacity(p_, at.batch)) return;
        const int position = p_.cache_seqlens[at.batch] + at.token;
        const Source from{p_.v_new, p_.v_new_stride_batch, p_.v_new_stride_row, p_.v_new_stride_head};
        const Row row = read(from.row(at.batch, at.token, at.head), p_.headdim_v);
        const int64_t to = in_cache(at, position, p_.v_stride_batch, p_.v_stride_row, p_.v_stride_head);
        const int64_t scale_to =
            in_cache(at, position, p_.v_scale_stride_batch, p_.v_scale_stride_row, p_.v_scale_stride_head);
        write_cached(row, static_cast<CacheItem*>(p_.v) + to, p_.v_scale + scale_to, p_.headdim_v);
    }

    FA_DEVICE void rotate_query(int64_t index) const {
        const Place at = place_of(index, p_.nheads, p_.seqlen_q);
        if (!is_within_capacity(p_, at.batch)) return;
        const int position = p_.cache_seqlens[at.batch] + (p_.rotates_by_token ? at.token : 0);
        const Source from{p_.q, p_.q_stride_batch, p_.q_stride_row, p_.q_stride_head};
        write(read_rotated(from.row(at.batch, at.token, at.head), position), p_.q_rotated + index * p_.headdim, p_.headdim);
    }

    // The offset of a token in the cache, in elements.
    FA_DEVICE int64_t in_cache(const Place& at, int position, int64_t stride_batch, int64_t stride_row,
                               int64_t stride_head) const {
        int64_t block = p_.cache_batch_idx == nullptr ? at.batch : p_.cache_batch_idx[at.batch];
        int slot = position;
        if (p_.block_table != nullptr) {
            const int page = position / p_.page_block_size;
            slot -= page * p_.page_block_size;
            block = p_.block_table[at.batch * p_.block_table_stride + page];
        }
        return block * stride_batch + slot * stride_row + at.head * stride_head;
    }

    FA_DEVICE Row read(const uint16_t* from, int columns) const {
        Row row;
#pragma unroll
        for (int i = 0; i < kMostOfLane; ++i) {
            const int column = i * 32 + lane_index();
            row.x[i] = column < columns ? Element::widen(from[column]) : 0.0f;
        }
        return row;
    }

    // The first rotary_dim columns turn in pairs: 2i and 2i + 1 when interleaved, otherwise i and i + rotary_dim / 2.
    FA_DEVICE Row read_rotated(const uint16_t* from, int position) const {
        Row row = read(from, p_.headdim);
        const int half = p_.rotary_dim / 2;
        const int64_t angles = static_cast<int64_t>(position) * half;
#pragma unroll
        for (int i = 0; i < kMostOfLane; ++i) {
            const int column = i * 32 + lane_index();
            if (column >= p_.rotary_dim) continue;
            const bool is_first = p_.rotary_interleaved ? column % 2 == 0 : column < half;
            const int pair = p_.rotary_interleaved ? column / 2 : column % half;
            const int distance = p_.rotary_interleaved ? 1 : half;
            const float partner = Element::widen(from[is_first ? column + distance : column - distance]);
            const float cosine = Element::widen(p_.rotary_cos[angles + pair]);
            const float sine = Element::widen(p_.rotary_sin[angles + pair]);
            row.x[i] = row.x[i] * cosine + (is_first ? -partner : partner) * sine;
        }
        return row;
    }

    FA_DEVICE void write(const Row& row, uint16_t* to, int columns) const {
#pragma unroll
        for (int i = 0; i < kMostOfLane; ++i) {
            const int column = i * 32 + lane_index();
            if (column < columns) to[column] = static_cast<uint16_t>(Element::pack(row.x[i], 0.0f));
        }
    }

    FA_DEVICE void write_cached(const Row& row, uint16_t* to, float*, int columns) const { write(row, to, columns); }

    FA_DEVICE void write_cached(const Row& row, uint8_t* to, float* scale, int columns) const {
        const Scaled scaled = scaled_for(row.x);
        if (lane_index() == 0) *scale = scaled.scale;
#pragma unroll
        for (int i = 0; i < kMostOfLane; ++i) {
            const int column = i * 32 + lane_index();
            if (column < columns) to[column] = stored(row.x[i] * scaled.factor);
        }
    }

    const AppendParams& p_;
};

}  // namespace fastattention

extern "C" FA_KERNEL void FA_LAUNCH_BOUNDS(fastattention::kAppendWarps * 32, 1)
    fastattention_append(FA_PARAMETER fastattention::AppendParams params) {
    using namespace fastattention;
    wait_for_previous_kernel();
    let_next_kernel_start();
    Append(params).run(cta_index() * kAppendWarps + warp_index());
}
