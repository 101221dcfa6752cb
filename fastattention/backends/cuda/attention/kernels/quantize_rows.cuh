// Quantizes queries and keys for products in int8. A query row has its own scale. A group of keys shares one, and keys lose
// their mean over the tokens of a sequence. fastattention/quantized.py has the formulas. kLanesOfRow neighbouring lanes read
// a row, eight columns each.
#pragma once

#include "numbers.cuh"
#include "params.h"
#include "quantize.cuh"

namespace fastattention {

constexpr int kQuantizeThreads = Config::num_threads;
constexpr int kLanesOfRow = Config::lanes_of_row;
constexpr int kTeams = kQuantizeThreads / kLanesOfRow;  // each processes a row at a time
constexpr int kTileColumns = 8 * kLanesOfRow;
constexpr int kChunkTokens = 512;  // keys that a CTA sums up, as in quantize.py
constexpr int kRowsOfTeam = kKeysOfScale / kTeams;  // a CTA quantizes kKeysOfScale rows, of keys or queries
constexpr float kShare = 1.0f / (1 << 24);  // factor of keys in sums: exact, and no sum of floats overflows
constexpr int kSumBytes = Config::shared_bytes;
static_assert(kSumBytes == kQuantizeThreads * 8 * 4, "a thread has eight sums");

// Queries or keys of one head of one sequence.
struct HeadRows {
    const uint16_t* base;
    int64_t stride_row;
    int64_t first;  // first token, among the tokens of all sequences
    int count;
    int columns;

    // Reads the lane's columns of a row, zeros past its last column.
    FA_DEVICE void read(int row, float (&x)[8]) const {
        const int column = lane_index() % kLanesOfRow * 8;
        const bool exists = row < count && column < columns;
        const Words4 words = exists ? load_global_128(base + row * stride_row + column) : Words4{};
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = Element::widen(static_cast<uint16_t>(words.word[i / 2] >> i % 2 * 16));
    }
};

FA_DEVICE HeadRows head_rows(const uint16_t* base, int64_t stride_batch, int64_t stride_row, int64_t stride_head,
                             const int32_t* cu_seqlens, int seqlen, int batch, int head, int columns) {
    const bool varlen = cu_seqlens != nullptr;
    const int64_t first = varlen ? cu_seqlens[batch] : static_cast<int64_t>(batch) * seqlen;
    const int64_t offset = varlen ? first * stride_row : batch * stride_batch;
    const int count = varlen ? cu_seqlens[batch + 1] - cu_seqlens[batch] : seqlen;
    return {base + offset + head * stride_head, stride_row, first, count, columns};
}

FA_DEVICE HeadRows query_rows(const QuantizeParams& p, int batch, int head) {
    return head_rows(p.q, p.q_stride_batch, p.q_stride_row, p.q_stride_head, p.cu_seqlens_q, p.seqlen_q, batch, head,
                     p.headdim);
}
FA_DEVICE HeadRows key_rows(const QuantizeParams& p, int batch, int head) {
    return head_rows(p.k, p.k_stride_batch, p.k_stride_row, p.k_stride_head, p.cu_seqlens_k, p.seqlen_k, batch, head,
                     p.headdim);
}

FA_DEVICE int team() { return thread_index() / kLanesOfRow; }

// The address of the sum of a chunk of keys of a head, in (batch_size, num_chunks, nheads_k, columns).
FA_DEVICE float* sum_of_chunk(const QuantizeParams& p, int batch, int chunk, int head) {
    return p.sums + ((static_cast<int64_t>(batch) * p.num_chunks + chunk) * p.nheads_k + head) * p.columns;
}

// Sums a chunk of keys, times kShare: first within each team, then over the teams.
FA_DEVICE void sum_chunk(const QuantizeParams& p, int batch, int chunk, int head) {
    const HeadRows keys = key_rows(p, batch, head);
    float sum[8] = {};
    for (int row = chunk * kChunkTokens + team(); row < (chunk + 1) * kChunkTokens; row += kTeams) {
        float x[8];
        keys.read(row, x);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum[i] += x[i] - x[i] == 0.0f ? x[i] * kShare : 0.0f;  // 0 if x[i] is not finite
    }
    const uint32_t shared = shared_memory();
#pragma unroll
    for (int half = 0; half < 2; ++half)
        store_shared_128(
            shared + (thread_index() * 8 + half * 4) * 4,
            {as_bits(sum[half * 4]), as_bits(sum[half * 4 + 1]), as_bits(sum[half * 4 + 2]), as_bits(sum[half * 4 + 3])});
    cta_barrier();
    for (int column = thread_index(); column < p.columns; column += kQuantizeThreads) {
        float all = 0.0f;
        for (int other = 0; other < kTeams; ++other)
            all += as_float(load_shared_32(shared + (other * kTileColumns + column) * 4));
        sum_of_chunk(p, batch, chunk, head)[column] = all;
    }
}

// Stores the mean of a head's keys in shared memory, rounded to bfloat16, which mostly hides the order of summation.
FA_DEVICE void leave_mean(const QuantizeParams& p, int batch, int head, uint32_t shared) {
    const float count = static_cast<float>(key_rows(p, batch, head).count);
    for (int column = thread_index(); column < kTileColumns; column += kQuantizeThreads) {
        float sum = 0.0f;
        const int num_chunks = column < p.columns ? p.num_chunks : 0;
#pragma unroll 8
        for (int chunk = 0; chunk < num_chunks; ++chunk) sum += sum_of_chunk(p, batch, chunk, head)[column];
        const float mean = count == 0.0f ? 0.0f : divided(sum, count * kShare);
        const uint32_t bits = as_bits(mean);
        store_shared_32(shared + column * 4, (bits + 0x7fffu + (bits >> 16 & 1u)) & 0xffff0000u);
    }
    cta_barrier();
}

// Quantizes a tile of rows. All of them are read before the first is processed, as the kernel is bound by memory.
class RowQuantizer {
public:
    // kv_head: the key head whose mean is used.
    FA_DEVICE RowQuantizer(const QuantizeParams& p, const HeadRows& rows, int tile, int batch, int kv_head, bool needs_mean)
        : p_(p), rows_(rows), first_(tile * kKeysOfScale + team()) {
#pragma unroll
        for (int i = 0; i < kRowsOfTeam; ++i) rows.read(row(i), x_[i]);
        const uint32_t shared = shared_memory();
        if (!needs_mean) return;
        leave_mean(p, batch, kv_head, shared);
#pragma unroll
        for (int i = 0; i < 8; ++i) mean_[i] = as_float(load_shared_32(shared + (lane_index() % kLanesOfRow * 8 + i) * 4));
    }

    FA_DEVICE void round_queries(int batch, int head) const {
        const bool varlen = p_.cu_seqlens_q != nullptr;
        const int64_t first_scale =
            ((varlen ? 0 : static_cast<int64_t>(batch) * p_.nheads) + head) * p_.total_q + (varlen ? rows_.first : 0);
#pragma unroll
        for (int i = 0; i < kRowsOfTeam; ++i) {
            float shift = 0.0f;
#pragma unroll
            for (int j = 0; j < 8; ++j) shift += x_[i][j] * mean_[j];
            shift = sum_of_lanes<kLanesOfRow>(shift);
            const Scaled scaled = scaled_for<kLanesOfRow>(x_[i]);
            if (row(i) >= rows_.count) continue;
            store_row(i, scaled.factor, p_.q_stored, (rows_.first + row(i)) * p_.nheads + head);
            if (lane_index() % kLanesOfRow != 0) continue;
            p_.q_scale[first_scale + row(i)] = scaled.scale;
            if (p_.q_shift != nullptr) p_.q_shift[first_scale + row(i)] = shift;
        }
    }

    FA_DEVICE void round_keys(int tile, int batch, int head) {
        Extent extent{0.0f, true};
#pragma unroll
        for (int i = 0; i < kRowsOfTeam; ++i) {
#pragma unroll
            for (int j = 0; j < 8; ++j) x_[i][j] -= mean_[j];
            if (row(i) < rows_.count) extent.add(x_[i]);
        }
        const Scaled scaled = scaled_for(of_cta(extent));
        if (thread_index() == 0)
            p_.k_scale[(static_cast<int64_t>(batch) * p_.nheads_k + head) * p_.k_tiles + tile] = scaled.scale;
#pragma unroll
        for (int i = 0; i < kRowsOfTeam; ++i)
            if (row(i) < rows_.count) store_row(i, scaled.factor, p_.k_stored, (rows_.first + row(i)) * p_.nheads_k + head);
    }

private:
    FA_DEVICE int row(int i) const { return first_ + i * kTeams; }

    // The extent of the values of all threads.
    FA_DEVICE static Extent of_cta(const Extent& of_thread) {
        const Extent of_warp = of_thread.of_lanes<32>();
        const uint32_t shared = shared_memory();
        const int this_warp = warp_index();
        cta_barrier();  // the mean has been read
        if (lane_index() == 0) store_shared_32(shared + this_warp * 4, as_bits(of_warp.finite ? of_warp.amax : infinity()));
        cta_barrier();
        float amax = 0.0f;
#pragma unroll
        for (int warp = 0; warp < kQuantizeThreads / 32; ++warp)
            amax = maximum(amax, as_float(load_shared_32(shared + warp * 4)));
        return {amax, amax != infinity()};
    }

    FA_DEVICE void store_row(int i, float factor, uint8_t* stored_rows, int64_t at) const {
        Words2 words{{0, 0}};
#pragma unroll
        for (int j = 0; j < 8; ++j) words.word[j / 4] |= static_cast<uint32_t>(stored(x_[i][j] * factor)) << j % 4 * 8;
        const int column = lane_index() % kLanesOfRow * 8;
        if (column < p_.columns) store_global_64(stored_rows + at * p_.columns + column, words);
    }

    const QuantizeParams& p_;
    const HeadRows rows_;
    const int first_;
    float x_[kRowsOfTeam][8], mean_[8] = {};
};

}  // namespace fastattention

extern "C" FA_KERNEL void FA_LAUNCH_BOUNDS(fastattention::kQuantizeThreads, 1)
    fastattention_sum_keys(FA_PARAMETER fastattention::QuantizeParams params) {
    using namespace fastattention;
    const int64_t index = cta_index();
    const int chunk = static_cast<int>(index % params.num_chunks), head_index = static_cast<int>(index / params.num_chunks);
    sum_chunk(params, head_index / params.nheads_k, chunk, head_index % params.nheads_k);
}

// The first CTAs quantize tiles of queries, the others tiles of keys.
extern "C" FA_KERNEL void FA_LAUNCH_BOUNDS(fastattention::kQuantizeThreads, 1)
    fastattention_quantize_rows(FA_PARAMETER fastattention::QuantizeParams params) {
    using namespace fastattention;
    const int64_t of_queries = static_cast<int64_t>(params.batch_size) * params.nheads * params.q_tiles;
    const int64_t index = cta_index();
    const bool is_query = index < of_queries;
    const int64_t within = is_query ? index : index - of_queries;
    const int tiles = is_query ? params.q_tiles : params.k_tiles, nheads = is_query ? params.nheads : params.nheads_k;
    const int tile = static_cast<int>(within % tiles), head_index = static_cast<int>(within / tiles);
    const int batch = head_index / nheads, head = head_index % nheads;
    const HeadRows rows = is_query ? query_rows(params, batch, head) : key_rows(params, batch, head);
    if (tile * kKeysOfScale >= rows.count) return;
    const int kv_head = is_query ? head / (params.nheads / params.nheads_k) : head;
    RowQuantizer quantizer(params, rows, tile, batch, kv_head, !is_query || params.q_shift != nullptr);
    if (is_query) {
        quantizer.round_queries(batch, head);
    } else {
        quantizer.round_keys(tile, batch, head);
    }
}
