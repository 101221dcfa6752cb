// Chunked linear attention, one chunk of tokens after the other. A warp has columns of the state of a head, and of v and out,
// as its rows: so every product takes its own accumulators as operand A, and warps share nothing but tiles. With what
// prepare.cuh found, transposed:
//
//     y = S K^T                        what the state S holds for the keys, a row for each column of v
//     u = beta (V - a y), u += u T^T   of the delta rule, T being its inverse less I; otherwise u = V
//     o = a S Q^T + u A^T              A: scores, a: products of gates
//     S = a S + (a u) K
//
// With a gate for every key dimension Q and K of the last three hold them already, and those of S multiply its columns.
#pragma once

#include FA_ARCH_HEADER

#include "epilogue.cuh"
#include "factors.cuh"

namespace fastattention {

constexpr bool kGatePerKey = FA_GATE_PER_KEY;
constexpr int kColumns = kHeaddimV;  // of v, of a CTA
static_assert(kColumns == kWarps * Arch::kStepRows, "a warp has a step of rows");
static_assert(!(kDeltaRule && kGatePerKey), "the delta rule has one gate a head");

// Copies numbers that lie in order: 16 bytes at a time.
template <int kBytes>
class NumbersCopy {
public:
    FA_DEVICE void begin(const float* from, uint32_t to) {
#pragma unroll
        for (int i = 0; i < kOfThread; ++i) {
            const int at = (thread_index() + i * kThreads) * 16;
            if (at >= kBytes) break;
            if constexpr (Arch::kAsyncCopy) {
                copy_async_128(to + at, from + at / 4, true);
            } else {
                store_shared_128(to + at, load_global_128(from + at / 4));
            }
        }
    }

private:
    static constexpr int kOfThread = (kBytes / 16 + kThreads - 1) / kThreads;
};

// What a chunk needs in shared memory.
class ChunkTiles {
    using TokenCopy = TileCopy<Arch, WholeCta, uint16_t, false, kChunk, kHeaddim>;
    using SquareCopy = TileCopy<Arch, WholeCta, uint16_t, false, kChunk, kChunk>;
    using ValueCopy = TileCopy<Arch, WholeCta, uint16_t, false, kChunk, kColumns>;
    using FactorCopy = NumbersCopy<(kGatePerKey ? kHeaddim : kFactors) * 4>;
    static constexpr int kQueries = TokenCopy::kBytes, kScores = 2 * TokenCopy::kBytes,
                         kInverse = kScores + SquareCopy::kBytes, kValues = kInverse + (kDeltaRule ? SquareCopy::kBytes : 0),
                         kFactorsAt = kValues + ValueCopy::kBytes;

public:
    static constexpr int kValuePitch = ValueCopy::kPitch;
    static constexpr int kBytes = kFactorsAt + (kGatePerKey ? kHeaddim : kFactors) * 4;

    FA_DEVICE ChunkTiles(const ChunkParams& p, const Sequence& sequence, int head, int column)
        : keys_(tokens(p, sequence, head, p.k, p.k_scaled, p.k_stride_batch, p.k_stride_row, p.k_stride_head)),
          queries_(tokens(p, sequence, head, p.q, p.q_scaled, p.q_stride_batch, p.q_stride_row, p.q_stride_head)),
          scores_({p.scores + slot_of(p, sequence, head) * (kChunk * kChunk), kChunk, rows_of_slots(sequence), kChunk}),
          inverse_({p.inverse + slot_of(p, sequence, head) * (kChunk * kChunk), kChunk, rows_of_slots(sequence), kChunk}),
          values_({p.v + sequence.offset(p.v_stride_batch, p.v_stride_row, p.v_stride_head, head) + column, p.v_stride_row,
                   sequence.length, p.columns_v - column}),
          factors_(p.factors + slot_of(p, sequence, head) * (kGatePerKey ? kHeaddim : kFactors)) {}

    FA_DEVICE void begin(int chunk, uint32_t to) {
        const int first = chunk * kChunk;
        copy(keys_, first, to);
        copy(queries_, first, to + kQueries);
        copy(scores_, first, to + kScores);
        if constexpr (kDeltaRule) copy(inverse_, first, to + kInverse);
        copy(values_, first, to + kValues);
        FactorCopy().begin(factors_ + static_cast<int64_t>(chunk) * (kGatePerKey ? kHeaddim : kFactors), to + kFactorsAt);
    }

    static FA_DEVICE uint32_t keys(uint32_t tiles) { return tiles; }
    static FA_DEVICE uint32_t queries(uint32_t tiles) { return tiles + kQueries; }
    static FA_DEVICE uint32_t scores(uint32_t tiles) { return tiles + kScores; }
    static FA_DEVICE uint32_t inverse(uint32_t tiles) { return tiles + kInverse; }
    // The columns of the warp.
    static FA_DEVICE uint32_t values(uint32_t tiles) { return tiles + kValues + warp_index() * Arch::kStepRows * 2; }
    static FA_DEVICE uint32_t factor(uint32_t tiles, int at) { return tiles + kFactorsAt + at * 4; }

private:
    // Rows of q or k; with gates of keys what scratch holds instead.
    static FA_DEVICE typename TokenCopy::Source tokens(const ChunkParams& p, const Sequence& sequence, int head,
                                                       const uint16_t* base, const uint16_t* scaled, int64_t stride_batch,
                                                       int stride_row, int64_t stride_head) {
        if constexpr (kGatePerKey)
            return {scaled + slot_of(p, sequence, head) * (kChunk * kHeaddim), kHeaddim, rows_of_slots(sequence), kHeaddim};
        return {base + sequence.offset(stride_batch, stride_row, stride_head, head / p.group_size), stride_row,
                sequence.length, p.columns_k};
    }

    static FA_DEVICE int rows_of_slots(const Sequence& sequence) { return sequence.num_chunks() * kChunk; }

    template <class Copy>
    static FA_DEVICE void copy(Copy& rows, int first, uint32_t to) {
        rows.begin(first, to);
        rows.finish(to);
    }

    TokenCopy keys_, queries_;
    SquareCopy scores_, inverse_;
    ValueCopy values_;
    const float* const factors_;
};
static_assert(kStages * ChunkTiles::kBytes == FA_SHARED_BYTES, "chunk_config.py computes the same");

class Scan {
public:
    // column: the CTA's first of v.
    FA_DEVICE Scan(const ChunkParams& p, int sequence, int head, int column)
        : p_(p), sequence_(sequence_at(p, sequence)), head_(head), column_(column) {}

    FA_DEVICE void run() {
        read_state();
        const uint32_t shared = shared_memory();
        if constexpr (kStages > 1) {
            const int chunks = sequence_.num_chunks();
            ChunkTiles tiles(p_, sequence_, head_, column_);
            // One barrier a chunk says both that its tiles have arrived and that nobody uses those before them any more.
            if (chunks > 0) tiles.begin(0, shared);
            copy_async_commit();
            for (int chunk = 0; chunk < chunks; ++chunk) {
                copy_async_wait<0>();
                cta_barrier();
                if (chunk + 1 < chunks) tiles.begin(chunk + 1, shared + (chunk + 1) % 2 * ChunkTiles::kBytes);
                copy_async_commit();
                add_chunk(chunk, shared + chunk % 2 * ChunkTiles::kBytes);
            }
        } else {
            for (int chunk = 0; chunk * kChunk < sequence_.length; ++chunk) {
                if (chunk > 0) cta_barrier();
                // Found anew for each chunk where tiles lie: the state leaves few registers to keep it.
                ChunkTiles(p_, sequence_, opaque(head_), opaque(column_)).begin(chunk, shared);
                if constexpr (Arch::kAsyncCopy) {
                    copy_async_commit();
                    copy_async_wait<0>();
                }
                cta_barrier();
                add_chunk(chunk, shared);
            }
        }
        if (p_.final_state != nullptr) write_state();
    }

private:
    static_assert(kStages == 1 || (kStages == 2 && Arch::kAsyncCopy), "two stages are what is here");
    static constexpr int kElements = Arch::kElements;
    using State = float[1][kHeaddim / 8][kElements];
    using Tokens = float[1][kChunk / 8][kElements];  // a column for each
    using StateRows = typename Arch::template ValueRows<1, kHeaddim>;
    using TokenRows = typename Arch::template ScoreRows<1, kChunk>;

    // Of v, the warp's first.
    FA_DEVICE int warp_column() const { return column_ + warp_index() * Arch::kStepRows; }

    FA_DEVICE void add_chunk(int chunk, uint32_t tiles) {
        Tokens updates = {};
        if constexpr (!kDeltaRule) add_values(updates, tiles);
        // What the state holds for keys, then for queries. Not unrolled where registers are short: the compiler would keep the
        // state as operands from the first product to the second.
#pragma unroll Arch::kAsyncCopy ? 2 : 1
        for (int turn = kDeltaRule ? 0 : 1; turn < 2; ++turn) {
            Tokens x = {};
            Arch::multiply_rows(x, StateRows(state_), turn == 0 ? ChunkTiles::keys(tiles) : ChunkTiles::queries(tiles));
            if (turn == 0) {
                find_updates(updates, x, tiles);
            } else {
                if constexpr (!kGatePerKey) scale<kQueriesOfState>(x, tiles, 1.0f);
                Arch::multiply_rows(x, TokenRows(updates), ChunkTiles::scores(tiles));
                write_out(x, chunk, ChunkTiles::values(tiles));
            }
        }
        decay_state(tiles);
        if constexpr (!kGatePerKey) scale<kKeysToState>(updates, tiles, 1.0f);
        const typename Arch::template Values<kHeaddim> keys(ChunkTiles::keys(tiles));
#pragma unroll
        for (int group = 0; group < kChunk / Arch::kKeyStep; ++group) keys.accumulate(state_, updates, group);
    }

    // Of the delta rule, from what the state holds for keys.
    static FA_DEVICE void find_updates(Tokens& updates, Tokens& x, uint32_t tiles) {
        scale<kKeysOfState>(x, tiles, -1.0f);
        add_values(x, tiles);
        scale<kBetas>(x, tiles, 1.0f);
#pragma unroll
        for (int n = 0; n < kChunk / 8; ++n)
#pragma unroll
            for (int i = 0; i < kElements; ++i) updates[0][n][i] = x[0][n][i];
        Arch::multiply_rows(updates, TokenRows(x), ChunkTiles::inverse(tiles));
    }

    // x += V, transposed by a product with I: exact, and accumulators need no other way to be filled.
    static FA_DEVICE void add_values(Tokens& x, uint32_t tiles) {
        float identity[1][Arch::kStepRows / 8][kElements];
#pragma unroll
        for (int n = 0; n < Arch::kStepRows / 8; ++n)
#pragma unroll
            for (int i = 0; i < kElements; ++i)
                identity[0][n][i] = Arch::row(Arch::row_of_element(i)) == Arch::score_column(n, i) ? 1.0f : 0.0f;
        const typename Arch::template ScoreRows<1, Arch::kStepRows, kColumns> rows(identity);
        Arch::multiply_rows(x, rows, ChunkTiles::values(tiles));
    }

    // Columns by the numbers of a plane, and all by one.
    template <FactorPlane kPlane>
    static FA_DEVICE void scale(Tokens& x, uint32_t tiles, float factor) {
#pragma unroll
        for (int n = 0; n < kChunk / 8; ++n)
            scale_columns(
                x[0][n], [&](int i) { return ChunkTiles::factor(tiles, kPlane * kChunk + Arch::score_column(n, i)); },
                factor);
    }

    FA_DEVICE void decay_state(uint32_t tiles) {
        const float factor = kGatePerKey ? 1.0f : as_float(load_shared_32(ChunkTiles::factor(tiles, kStateFactor)));
#pragma unroll
        for (int n = 0; n < kHeaddim / 8; ++n) {
            if constexpr (kGatePerKey) {
                scale_columns(state_[0][n], [&](int i) { return ChunkTiles::factor(tiles, Arch::value_column(n, i)); }, 1.0f);
            } else {
#pragma unroll
                for (int i = 0; i < kElements; ++i) state_[0][n][i] *= factor;
            }
        }
    }

    // at: of a number, and its neighbour, for an element and the next one.
    template <class At>
    static FA_DEVICE void scale_columns(float (&x)[kElements], At at, float factor) {
#pragma unroll
        for (int first = 0; first < kElements; first += 2) {
            if (Arch::row_of_element(first) != 0) continue;
            const Words2 pair = load_shared_64(at(first));
#pragma unroll
            for (int i = 0; i < kElements; ++i)
                if (Arch::column_of_element(i) / 2 == Arch::column_of_element(first) / 2)
                    x[i] *= as_float(pair.word[i % 2]) * factor;
        }
    }

    // Through the place of the warp's values. A lane has two tokens of a column of v, the lane beside it those of the next
    // column: after an exchange either has both columns of one token.
    FA_DEVICE void write_out(const Tokens& out, int chunk, uint32_t values) const {
        warp_barrier();
        const bool odd = lane_index() & Arch::kNeighbour;
#pragma unroll
        for (int n = 0; n < kChunk / 8; ++n)
#pragma unroll
            for (int i = 0; i < kElements; i += 2) {
                const float first = out[0][n][i], second = out[0][n][i + 1];
                const float received = shuffle_xor(odd ? first : second, Arch::kNeighbour);
                const int row = Arch::row(Arch::row_of_element(i)) / 2 * 2, token = Arch::score_column(n, i) + odd;
                store_shared_32(values + token * ChunkTiles::kValuePitch + row * 2,
                                odd ? Element::pack(received, second) : Element::pack(first, received));
            }
        warp_barrier();
        const int64_t first = static_cast<int64_t>(sequence_.batch) * p_.seqlen + sequence_.first + chunk * kChunk;
        const int64_t stride = static_cast<int64_t>(p_.nheads) * p_.columns_v;
        const RowsOut rows{p_.out + first * stride + head_ * p_.columns_v + warp_column(), stride,
                           sequence_.length - chunk * kChunk, p_.columns_v - warp_column()};
        copy_rows<kChunk, Arch::kStepRows, ChunkTiles::kValuePitch>(rows, values, 0);
    }

    // Calls visit(element of the state, key dimension, column of v) of those that there are.
    template <class Visit>
    FA_DEVICE void for_each_of_state(Visit visit) {
        const int first_column = warp_column();
#pragma unroll
        for (int n = 0; n < kHeaddim / 8; ++n) {
            // Volta's state leaves few registers for addresses: one after the other.
            if constexpr (!Arch::kAsyncCopy) warp_barrier();
#pragma unroll
            for (int i = 0; i < kElements; ++i) {
                const int key = Arch::value_column(n, i), column = first_column + Arch::row(Arch::row_of_element(i));
                if (key < p_.headdim_k && column < p_.headdim_v) visit(state_[0][n][i], key, column);
            }
        }
    }

    // Of the sequence.
    FA_DEVICE int64_t index() const { return cta_index() / (static_cast<int64_t>(p_.num_parts) * p_.nheads); }

    FA_DEVICE void read_state() {
#pragma unroll
        for (int n = 0; n < kHeaddim / 8; ++n)
#pragma unroll
            for (int i = 0; i < kElements; ++i) state_[0][n][i] = 0.0f;
        if (p_.initial_state == nullptr) return;
        const float* from = p_.initial_state + index() * p_.state_stride_sequence + head_ * p_.state_stride_head;
        for_each_of_state([&](float& x, int key, int column) { x = from[key * p_.state_stride_key + column]; });
    }

    FA_DEVICE void write_state() {
        float* to = p_.final_state + (index() * p_.nheads + head_) * p_.headdim_k * p_.headdim_v;
        for_each_of_state([&](float& x, int key, int column) { to[key * p_.headdim_v + column] = x; });
    }

    const ChunkParams& p_;
    const Sequence sequence_;
    const int head_, column_;
    State state_;
};

}  // namespace fastattention

extern "C" FA_KERNEL void FA_LAUNCH_BOUNDS(fastattention::kThreads, FA_MIN_CTAS)
    fastattention_linear_scan(FA_PARAMETER fastattention::ChunkParams params) {
    using namespace fastattention;
    wait_for_previous_kernel();
    // CTAs of one head are neighbours: they read the same tiles.
    const int part = static_cast<int>(cta_index() % params.num_parts);
    const int index = static_cast<int>(cta_index() / params.num_parts);
    Scan(params, index / params.nheads, index % params.nheads, part * kColumns).run();
}
