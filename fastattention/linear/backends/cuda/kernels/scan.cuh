// Chunked linear attention, one chunk of tokens after the other. A CTA has columns of the state of a head, and of v and out. Its
// warps share out the key dimensions of the state, which stays in their accumulators, and the tokens of all else. With what
// prepare.cuh found, and columns of v as rows of all operands but the last:
//
//     y = S K^T                        what the state S holds for the keys
//     u = beta (V - a y), u += u T^T   of the delta rule, T being its inverse less I; otherwise u = V
//     S = a S + (a u) K                a: products of gates
//     o = a Q S^T + A u^T              A: scores; S as it was before
//
// What one warp finds and others need lies in shared memory as operands. With a gate for every key dimension Q and K of the
// last two hold the gates already, and those of S multiply its columns.
#pragma once

#include "chunk_tiles.cuh"

namespace fastattention {

constexpr int kSteps = kColumns / Arch::kStepRows;
constexpr int kKeyDims = kHeaddim / kWarps;  // of the state, of a warp
constexpr int kTokens = kChunk / kWarps;  // likewise of keys and updates
constexpr int kQueryGroups = kChunk / Arch::kStepRows;
constexpr int kOutColumns = kColumns * kQueryGroups / kWarps;  // of a warp, for a group of queries
// Whether products of the state with keys and with queries take the same operands.
constexpr bool kSharesOperands = kDeltaRule && Arch::kRowsAreColumns && kOutColumns == kColumns;
static_assert(!Arch::kRowsAreColumns || kChunk >= 32, "its products with eight tokens take 32 columns at once");
static_assert(kOutColumns % 8 == 0 && kTokens % 8 == 0 && kKeyDims % 16 == 0, "warps have whole accumulators");

class Scan {
public:
    // column: the CTA's first of v.
    FA_DEVICE Scan(const ChunkParams& p, int sequence, int head, int column)
        : p_(p), sequence_(sequence_at(p, sequence)), head_(head), column_(column), warp_(warp_index()) {}

    FA_DEVICE void run() {
        const uint32_t shared = shared_memory();
        const int chunks = sequence_.num_chunks();
        if constexpr (kStages > 1) {
            ChunkTiles tiles(p_, sequence_, head_, column_);
            tiles.begin(0, shared);
            copy_async_commit();
            read_state();
            leave_state();
            for (int chunk = 0; chunk < chunks; ++chunk) {
                // Tiles and the state have arrived, and nobody uses the tiles before them any more.
                copy_async_wait<0>();
                cta_barrier();
                add_chunk(shared + chunk % 2 * ChunkTiles::kBytes, [&] {
                    // A branch keeps the compiler from loading more operands before it than there are registers for. Of one
                    // step there are, and copies begin while products go on.
                    if (kSteps == 1 || chunk + 1 < chunks)
                        tiles.begin(chunk + 1, shared + (chunk + 1) % 2 * ChunkTiles::kBytes);
                    copy_async_commit();
                    write_out(chunk - 1, shared);
                });
            }
            copy_async_wait<0>();
            warp_barrier();
            write_out(chunks - 1, shared);
        } else {
            read_state();
            leave_state();
            for (int chunk = 0; chunk < chunks; ++chunk) {
                if (chunk > 0) cta_barrier();
                // Found anew for each chunk where tiles lie: the state leaves few registers to keep it.
                ChunkTiles(p_, sequence_, opaque(head_), opaque(column_)).begin(chunk, shared);
                cta_barrier();
                add_chunk(shared, [] {});
                warp_barrier();
                write_out(chunk, shared);
            }
        }
        if (p_.final_state != nullptr) write_state();
    }

private:
    static_assert(kStages == (Arch::kAsyncCopy ? 2 : 1), "asynchronous copies have two stages");
    static constexpr int kElements = Arch::kElements;
    using State = float[kSteps][kKeyDims / 8][kElements];
    using Tokens = float[kSteps][kTokens / 8][kElements];  // a column for each
    using Out = float[1][kOutColumns / 8][kElements];  // rows of queries
    using QueryRows = typename Arch::template Rows<1, kHeaddim>;
    using TokenRows = typename Arch::template Rows<kSteps, kChunk>;

    // Of a lane's columns. at: where that of an element of an accumulator stands, and behind it that of the next element.
    template <int kTiles>
    struct ColumnFactors {
        float x[kTiles][kElements / 2];

        template <class At>
        explicit FA_DEVICE ColumnFactors(At at) {
#pragma unroll
            for (int n = 0; n < kTiles; ++n)
#pragma unroll
                for (int i = 0; i < kElements; i += 2) {
                    if (Arch::row_of_element(i) != 0) continue;
                    const Words2 pair = load_shared_64(at(n, i));
                    x[n][Arch::column_of_element(i)] = as_float(pair.word[0]);
                    x[n][Arch::column_of_element(i) + 1] = as_float(pair.word[1]);
                }
        }
    };

    // The warp's first.
    FA_DEVICE int first_key() const { return warp_ * kKeyDims; }
    FA_DEVICE int first_token() const { return warp_ * kTokens; }
    FA_DEVICE int first_query() const { return warp_ % kQueryGroups * Arch::kStepRows; }
    FA_DEVICE int first_out_column() const { return warp_ / kQueryGroups * kOutColumns; }

    // Between the barriers before and in it warps read what others left before the first of the two: the state, `rest`, then
    // updates. The state of the next chunk takes its place when all have asked it. meanwhile: called while products are
    // under way.
    template <class Meanwhile>
    FA_DEVICE void add_chunk(uint32_t tiles, Meanwhile meanwhile) {
        Out out = {};
        Tokens updates = {};
        if constexpr (kDeltaRule) {
            find_rest<Arch>(updates, out, tiles, meanwhile);
            cta_barrier();
            TokenRows rest;
            rest.load(exchange_.rest());
            Arch::multiply_rows(updates, rest, ChunkTiles::inverse(tiles) + first_token() * ChunkTiles::kSquarePitch);
            if constexpr (!kSharesOperands) ask_state(out, tiles);
        } else {
            ask_state(out, tiles);
            read_values(updates, tiles);
            meanwhile();
        }
        leave_tokens(updates, exchange_.updates());
        if constexpr (!kGatePerKey) {
            scale(updates, token_factors(kKeysToState, tiles));
            scale_queries(out, tiles);
            leave_tokens(updates, exchange_.to_state());
        }
        cta_barrier();
        typename Arch::template Rows<1, kChunk> scores;
        scores.load(ChunkTiles::scores(tiles) + first_query() * ChunkTiles::kSquarePitch);
        Arch::multiply_rows(out, scores, exchange_.updates() + first_out_column() * Exchange::kTokenPitch);
        add_updates(tiles);
        leave_state();
        Arch::template leave_scores<Exchange::kOutPitch>(
            out, exchange_.out(tiles) + first_query() * Exchange::kOutPitch + first_out_column() * 2);
    }

    // What the state holds for the warp's queries.
    FA_DEVICE void ask_state(Out& out, uint32_t tiles) const {
        Arch::multiply_rows(out, queries(tiles), exchange_.state() + first_out_column() * Exchange::kStatePitch);
    }

    // Of the delta rule: x, what values are more than the state holds for their keys; and, with it, ask_state's. Path:
    // Arch; of a parameter the compiler does not look for what is not called.
    template <class Path, class Meanwhile>
    FA_DEVICE void find_rest(Tokens& x, Out& out, uint32_t tiles, Meanwhile meanwhile) const {
        typename Arch::template Rows<kSteps, kHeaddim> state;
        state.load(exchange_.state());
        const uint32_t keys = ChunkTiles::keys(tiles) + first_token() * ChunkTiles::kTokenPitch;
        if constexpr (kSharesOperands) {
            Path::multiply_rows_and_columns(x, out, state, keys, queries(tiles), meanwhile);
        } else {
            Arch::multiply_rows(x, state, keys);
            meanwhile();
        }
        Tokens values;
        read_values(values, tiles);
        const auto gates = token_factors(kKeysOfState, tiles), betas = token_factors(kBetas, tiles);
        scale(x, gates);
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
#pragma unroll
            for (int n = 0; n < kTokens / 8; ++n)
#pragma unroll
                for (int i = 0; i < kElements; ++i) x[step][n][i] = values[step][n][i] - x[step][n][i];
        scale(x, betas);
        leave_tokens(x, exchange_.rest());
    }

    // Of the warp's tokens; of its queries.
    FA_DEVICE ColumnFactors<kTokens / 8> token_factors(FactorPlane plane, uint32_t tiles) const {
        return ColumnFactors<kTokens / 8>([&](int n, int i) {
            return ChunkTiles::factor(tiles, plane * kChunk + first_token() + Arch::score_column(n, i));
        });
    }

    FA_DEVICE QueryRows queries(uint32_t tiles) const {
        QueryRows rows;
        rows.load(ChunkTiles::queries(tiles) + first_query() * ChunkTiles::kTokenPitch);
        return rows;
    }

    FA_DEVICE void scale_queries(Out& out, uint32_t tiles) const {
#pragma unroll
        for (int i = 0; i < kElements; ++i) {
            const int query = first_query() + Arch::row(Arch::row_of_element(i));
            const float factor = as_float(load_shared_32(ChunkTiles::factor(tiles, kQueriesOfState * kChunk + query)));
#pragma unroll
            for (int n = 0; n < kOutColumns / 8; ++n) out[0][n][i] *= factor;
        }
    }

    // Of the warp's tokens.
    FA_DEVICE void read_values(Tokens& x, uint32_t tiles) const {
        Arch::template read_transposed<kColumns>(x, ChunkTiles::values(tiles) + first_token() * ChunkTiles::kValuePitch);
    }

    FA_DEVICE void leave_tokens(const Tokens& x, uint32_t to) const {
        Arch::template leave_scores<Exchange::kTokenPitch>(x, to + first_token() * 2);
    }

    FA_DEVICE void leave_state() const {
        Arch::template leave_values<Exchange::kStatePitch>(state_, exchange_.state() + first_key() * 2);
    }

    FA_DEVICE void add_updates(uint32_t tiles) {
        decay_state(tiles);
        TokenRows updates;
        updates.load(exchange_.to_state());
        const typename Arch::template Values<kHeaddim> keys(ChunkTiles::keys(tiles) + first_key() * 2);
#pragma unroll
        for (int group = 0; group < kChunk / Arch::kKeyStep; ++group) keys.accumulate(state_, updates, group);
    }

    FA_DEVICE void decay_state(uint32_t tiles) {
        if constexpr (kGatePerKey) {
            const auto at = [&](int n, int i) { return ChunkTiles::factor(tiles, first_key() + Arch::value_column(n, i)); };
            scale(state_, ColumnFactors<kKeyDims / 8>(at));
        } else {
            const float factor = as_float(load_shared_32(ChunkTiles::factor(tiles, kStateFactor)));
#pragma unroll
            for (int step = 0; step < kSteps; ++step)
#pragma unroll
                for (int n = 0; n < kKeyDims / 8; ++n)
#pragma unroll
                    for (int i = 0; i < kElements; ++i) state_[step][n][i] *= factor;
        }
    }

    template <int kTiles>
    static FA_DEVICE void scale(float (&x)[kSteps][kTiles][kElements], const ColumnFactors<kTiles>& factors) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
#pragma unroll
            for (int n = 0; n < kTiles; ++n)
#pragma unroll
                for (int i = 0; i < kElements; ++i) x[step][n][i] *= factors.x[n][Arch::column_of_element(i)];
    }

    // What the warp left of a chunk; nothing of that before the first.
    FA_DEVICE void write_out(int chunk, uint32_t tiles) const {
        constexpr int kPieces = kOutColumns / 8, kAll = Arch::kStepRows * kPieces;
        const uint32_t from = exchange_.out(tiles) + first_query() * Exchange::kOutPitch + first_out_column() * 2;
        const int first = chunk * kChunk + first_query(), first_column = column_ + first_out_column();
        const int64_t stride = static_cast<int64_t>(p_.nheads) * p_.columns_v;
        const int64_t row = static_cast<int64_t>(sequence_.batch) * p_.seqlen + sequence_.first + first;
        uint16_t* const to = p_.out + row * stride + head_ * p_.columns_v + first_column;
#pragma unroll
        for (int i = 0; i < kAll; i += 32) {
            const int piece = (i + lane_index()) % kAll, row = piece / kPieces, column = piece % kPieces * 8;
            if (first >= 0 && first + row < sequence_.length && first_column + column < p_.columns_v)
                store_global_128(to + row * stride + column, load_shared_128(from + row * Exchange::kOutPitch + column * 2));
        }
    }

    // Calls visit(element of the state, key dimension, column of v) of those that there are.
    template <class Visit>
    FA_DEVICE void for_each_of_state(Visit visit) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
#pragma unroll
            for (int n = 0; n < kKeyDims / 8; ++n) {
                // Volta's state leaves few registers for addresses: one after the other.
                if constexpr (!Arch::kAsyncCopy) warp_barrier();
#pragma unroll
                for (int i = 0; i < kElements; ++i) {
                    const int key = first_key() + Arch::value_column(n, i);
                    const int column = column_ + step * Arch::kStepRows + Arch::row(Arch::row_of_element(i));
                    if (key < p_.headdim_k && column < p_.headdim_v) visit(state_[step][n][i], key, column);
                }
            }
    }

    // Of the sequence.
    FA_DEVICE int64_t index() const { return cta_index() / (static_cast<int64_t>(p_.num_parts) * p_.nheads); }

    FA_DEVICE void read_state() {
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
#pragma unroll
            for (int n = 0; n < kKeyDims / 8; ++n)
#pragma unroll
                for (int i = 0; i < kElements; ++i) state_[step][n][i] = 0.0f;
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
    const int head_, column_, warp_;
    const Exchange exchange_;
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
