// Loads query rows with their rotary embedding, stores their results, and loads the scales of cache rows.
#pragma once

namespace FA_NAMESPACE {

// Equal to MAX_HEADDIM and MAX_HEADDIM_V of fastattention/attention/validation/common.py.
static constexpr int64_t kMaxHeaddim = 576, kMaxHeaddimV = 512;

// to[0..n) = the scales of rows `row` to row + n - 1.
static void load_scales(const Rows& rows, int64_t row, int64_t n, float* to) {
    if (rows.pages == nullptr) {
        const char* at = rows.base + row * rows.stride_row;
        if (rows.stride_row == sizeof(float)) {
            memcpy(to, at, n * sizeof(float));
            return;
        }
        for (int64_t j = 0; j < n; ++j, at += rows.stride_row) memcpy(to + j, at, sizeof(float));
        return;
    }
    int64_t page = (rows.first + row) / rows.page_size, slot = (rows.first + row) % rows.page_size;
    for (int64_t j = 0; j < n; ++page, slot = 0) {
        const char* at = rows.base + rows.pages[page] * rows.stride_page + slot * rows.stride_row;
        for (; slot < rows.page_size && j < n; ++slot, ++j, at += rows.stride_row) memcpy(to + j, at, sizeof(float));
    }
}

// Applies rotary embedding to one row at a position, in place. Interleaved: elements 2i and 2i + 1 turn by angle i (GPT-J);
// otherwise i and i + rotary_dim / 2 (GPT-NeoX, Llama).
template <class Element>
static void rotate_row(const FaAttentionParams& p, int64_t position, float* row) {
    const int64_t half = p.rotary_dim / 2;
    float cosine[kMaxHeaddim / 2 + Vec::kWidth], sine[kMaxHeaddim / 2 + Vec::kWidth];
    widen_row(static_cast<const Element*>(p.rotary_cos) + position * half, cosine, half, half);
    widen_row(static_cast<const Element*>(p.rotary_sin) + position * half, sine, half, half);
    const int64_t step = p.rotary_interleaved ? 2 : 1;
    const int64_t partner = p.rotary_interleaved ? 1 : half;
    for (int64_t i = 0; i < half; ++i) {
        const float x = row[i * step], y = row[i * step + partner];
        row[i * step] = x * cosine[i] - y * sine[i];
        row[i * step + partner] = x * sine[i] + y * cosine[i];
    }
}

// Row r of the group of query heads that share kv_head.
struct QueryRow {
    int64_t token;
    int64_t head;
};

FA_INLINE QueryRow query_row(const Call& call, int64_t kv_head, int64_t row) {
    return {row / call.group_size, kv_head * call.group_size + row % call.group_size};
}

FA_INLINE QueryRow query_row(const Call& call, int64_t kv_head, const RowTile& tile, int64_t row) {
    if (tile.head == RowTile::kAllHeads) return query_row(call, kv_head, tile.first + row);
    return {tile.first + row, kv_head * call.group_size + tile.head};
}

template <class Element>
FA_INLINE const Element* query_address(const Call& call, const Sequence& s, QueryRow at) {
    const FaAttentionParams& p = *call.params;
    return reinterpret_cast<const Element*>(s.q) + at.token * p.q_stride_row + at.head * p.q_stride_head;
}

template <class Element>
FA_INLINE void prefetch_query(const Call& call, const Sequence& s, QueryRow at) {
    prefetch_bytes(query_address<Element>(call, s, at), call.params->headdim * call.element_size);
}

// Loads a query row as floats, rotated when the call asks for it, padded with zeros up to `padded`.
template <class Element>
static void load_query(const Call& call, const Sequence& s, QueryRow at, float* to, int64_t padded) {
    const FaAttentionParams& p = *call.params;
    widen_row(query_address<Element>(call, s, at), to, p.headdim, padded);
    if (p.rotary_dim > 0) {
        const bool by_token = p.window_left >= 0 || p.window_right >= 0;
        rotate_row<Element>(p, s.cache_seqlen + (by_token ? at.token : 0), to);
    }
}

// The same for the dtype of the call.
static void load_query(const Call& call, const Sequence& s, QueryRow at, float* to, int64_t padded) {
    switch (call.params->dtype) {
        case FA_FLOAT32: return load_query<float>(call, s, at, to, padded);
        case FA_BFLOAT16: return load_query<Bfloat16>(call, s, at, to, padded);
        default: return load_query<Float16>(call, s, at, to, padded);
    }
}

// Writes a finished row: acc_o / row_sum, and lse. The sink is added to the denominator here.
template <class Element>
static void store_result(const Call& call, const Sequence& s, QueryRow at, const float* acc_o, float row_max, float row_sum) {
    const FaAttentionParams& p = *call.params;
    row_max *= ScoreUnits::of(p).natural;
    float scale = 1.0f;
    if (p.sinks) {
        const float sink = p.sinks[at.head], highest = row_max > sink ? row_max : sink;
        if (highest != -kInfinity) {
            scale = exp2((row_max - highest) * kLog2E);
            row_sum = row_sum * scale + exp2((sink - highest) * kLog2E);
            row_max = highest;
        }
    }
    const Vec factor = broadcast(row_sum > 0.0f || row_sum != row_sum ? scale / row_sum : 0.0f);
    Element* to = reinterpret_cast<Element*>(s.out) + at.token * p.out_stride_row + at.head * p.out_stride_head;
    store_scaled(acc_o, factor, to, p.headdim_v);
    if (s.lse) {
        const float lse = row_sum == 0.0f ? -kInfinity : row_max + log2(row_sum) * kLn2;
        s.lse[at.head * p.lse_stride_head + at.token] = lse;
    }
}

}  // namespace FA_NAMESPACE
