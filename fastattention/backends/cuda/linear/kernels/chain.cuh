// What kernels share that go from chunk to chunk (states.cuh, state_gradients.cuh). A CTA has some columns of v and of a
// head's state, with all key dimensions or a part of them. Its warps divide the key dimensions of the state, which stays in
// their accumulators, and the tokens of everything else. Columns of v are rows of operands.
//
// Where copies are asynchronous, producer warps issue them and write scratch: instructions that access global memory wait
// for each other, and the chain of chunks must not.
#pragma once

#include "chunk_tiles.cuh"

namespace fastattention {

constexpr int kSteps = kColumns / Arch::kStepRows;
constexpr int kKeyParts = Config::num_key_parts;  // CTAs that divide the key dimensions of a head
constexpr int kStateColumns = kKeyParts * kHeaddim;  // columns of a row of scratch
constexpr int kCopyWarps = Config::num_copy_warps, kStateWarps = kWarps - kCopyWarps;
constexpr int kKeyDims = kHeaddim / kStateWarps;  // key dimensions of the state per warp
constexpr int kTokens = kChunk / kStateWarps;  // tokens of keys and updates per warp
static_assert(kTokens % 8 == 0 && kKeyDims % 16 == 0, "warps have whole accumulators");
static_assert(!kDeltaRule || kKeyParts == 1, "it asks all of a column of the state");
static_assert((kCopyWarps > 0) == Arch::kAsyncCopy, "where copies go on meanwhile, warps of their own begin them");

// What warps exchange in shared memory: states, and values of tokens.
constexpr int kStatePitch = pitch_of<2>(kHeaddim), kTokenPitch = kTrianglePitch;
constexpr int kExchangedState = kColumns * kStatePitch, kExchangedTokens = kColumns * kTokenPitch;

// The threads that copy tiles and write scratch: all threads, or those of the last warps.
struct CopyTeam {
    static constexpr int kThreads = 32 * (kCopyWarps > 0 ? kCopyWarps : kWarps);
    static FA_DEVICE int index() { return thread_index() - (kCopyWarps > 0 ? 32 * kStateWarps : 0); }
};

class Chain {
public:
    // column, key: the CTA's first column of v, and its first key dimension.
    FA_DEVICE Chain(const ChunkParams& p, int sequence, int head, int column, int key)
        : p_(p), sequence_(sequence_at(p, sequence)), head_(head), column_(column), key_(key), warp_(warp_index()) {}

protected:
    static constexpr int kElements = Arch::kElements;
    using State = float[kSteps][kKeyDims / 8][kElements];
    using Tokens = float[kSteps][kTokens / 8][kElements];  // one column per token
    using TokenRows = typename Arch::template Rows<kSteps, kChunk>;
    using StateRows = typename Arch::template Rows<kSteps, kHeaddim>;
    template <int kColumnsOfTile>
    using Values = typename Arch::template Values<kColumnsOfTile>;

    // The factors of a lane's columns. at(n, i): the address of the factor of element i of accumulator n; the next
    // element's factor follows it.
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

    // The warp's first key dimension and its first token.
    FA_DEVICE int first_key() const { return warp_ * kKeyDims; }
    FA_DEVICE int first_token() const { return warp_ * kTokens; }

    // Chunks are counted by steps, in the order in which the chain takes them. After the last step comes no chunk.
    FA_DEVICE int num_chunks() const { return sequence_.num_chunks(); }
    FA_DEVICE int chunk_at(int step) const { return !kReversed || step >= num_chunks() ? step : num_chunks() - 1 - step; }
    FA_DEVICE int64_t slot(int step) const { return slot_of(p_, sequence_, head_) + chunk_at(step); }
    template <class Tiles>
    static FA_DEVICE uint32_t tiles_of(int step) {
        return shared_memory() + step % kStages * Tiles::kBytes;
    }

    // factors: address of the first of a chunk.
    static FA_DEVICE uint32_t factor(uint32_t factors, int at) { return factors + at * 4; }

    // The factors of the warp's tokens.
    FA_DEVICE ColumnFactors<kTokens / 8> token_factors(FactorPlane plane, uint32_t factors) const {
        return ColumnFactors<kTokens / 8>(
            [&](int n, int i) { return factor(factors, factor_of_token(plane, first_token() + Arch::score_column(n, i))); });
    }

    // Reads the warp's tokens from a tile that is kColumns wide.
    FA_DEVICE void read_tokens(Tokens& x, uint32_t tile) const {
        Arch::template read_transposed<kColumns>(x, tile + first_token() * pitch_of<2>(kColumns));
    }

    FA_DEVICE void leave_tokens(const Tokens& x, uint32_t to) const {
        Arch::template leave_scores<kTokenPitch>(x, to + first_token() * 2);
    }

    FA_DEVICE void leave_state(uint32_t to) const { Arch::template leave_values<kStatePitch>(state_, to + first_key() * 2); }

    // Adds what the state holds for the keys of the warp's tokens. state: where warps have left it.
    FA_DEVICE void ask(Tokens& x, uint32_t state, uint32_t keys) const {
        StateRows rows;
        rows.load(state);
        Arch::multiply_rows(x, rows, keys + first_token() * kStatePitch);
    }

    // Adds products of values of tokens, which warps have left, and their keys.
    FA_DEVICE void add_to_state(uint32_t tokens, uint32_t keys) {
        TokenRows rows;
        rows.load(tokens);
        const Values<kHeaddim> values(keys + first_key() * 2);
#pragma unroll
        for (int group = 0; group < kChunk / Arch::kKeyStep; ++group) values.accumulate(state_, rows, group);
    }

    FA_DEVICE void decay_state(uint32_t factors) {
        if constexpr (kGatePerKey) {
            const auto at = [&](int n, int i) { return factor(factors, first_key() + Arch::value_column(n, i)); };
            scale(state_, ColumnFactors<kKeyDims / 8>(at));
        } else {
            const float all = as_float(load_shared_32(factor(factors, kStateFactor)));
#pragma unroll
            for (int step = 0; step < kSteps; ++step)
#pragma unroll
                for (int n = 0; n < kKeyDims / 8; ++n)
#pragma unroll
                    for (int i = 0; i < kElements; ++i) state_[step][n][i] *= all;
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

    // Writes the state that warps have left in shared memory to scratch.
    FA_DEVICE void write_state(int64_t slot, uint32_t from) const {
        constexpr int kPieces = kHeaddim / 8, kAll = kColumns * kPieces;
        uint16_t* const to = p_.states + (slot * p_.columns_v + column_) * kStateColumns + key_;
#pragma unroll
        for (int i = 0; i < kAll; i += CopyTeam::kThreads) {
            const int piece = i + CopyTeam::index(), row = piece / kPieces, at = piece % kPieces * 8;
            if ((kAll % CopyTeam::kThreads == 0 || piece < kAll) && column_ + row < p_.columns_v)
                store_global_128(to + row * kStateColumns + at, load_shared_128(from + row * kStatePitch + at * 2));
        }
    }

    // Writes updates that warps have left in shared memory to scratch (chunk_tiles.cuh). A warp writes eight columns of 32
    // tokens at once, contiguously.
    FA_DEVICE void write_updates(int64_t slot, uint32_t from) const {
        constexpr int kParts = kChunk / 32, kAll = kColumns / 8 * kParts, kWarpsOfTeam = CopyTeam::kThreads / 32;
        uint16_t* const to = p_.updates + updates_at(p_, slot, column_);
#pragma unroll
        for (int i = 0; i < kAll; i += kWarpsOfTeam) {
            const int part = i + CopyTeam::index() / 32, column = part / kParts * 8, first = part % kParts * 8;
            if ((kAll % kWarpsOfTeam != 0 && part >= kAll) || column_ + column >= p_.columns_v) continue;
            const int lane = lane_index(), token = first + lane % 4 * (8 * kParts) + lane / 4;
            store_global_128(to + column * kChunk + token * 8, read_columns(from + column * kTokenPitch, first, token));
        }
    }

    // Reads eight columns of v, which are rows, of one token. first: the warp's first token; with 64 tokens a chunk, every
    // second eight are its own, which are in other banks.
    static FA_DEVICE Words4 read_columns(uint32_t from, int first, int token) {
        Words4 words;
        if constexpr (Arch::kAsyncCopy) {  // a matrix has two columns of all tokens
            const int lane = lane_index();
            load_matrices_transposed(
                words.word, from + (lane / 8 * 2 + lane % 2) * kTokenPitch + (first + lane % 8 / 2 * (kChunk / 4)) * 2);
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const uint32_t at = from + 2 * i * kTokenPitch + token / 2 * 4;
                words.word[i] =
                    permute_bytes(load_shared_32(at), load_shared_32(at + kTokenPitch), token % 2 ? 0x7632 : 0x5410);
            }
        }
        return words;
    }

    // What producer warps do, at the same barriers as the others: they copy tiles, and write the states and updates that are
    // left in `exchange`. kAhead: the others use tiles of the next step too.
    template <bool kAhead, class Tiles, class Exchange>
    FA_DEVICE void copy_chunks(Tiles tiles, const Exchange& exchange) const {
#pragma unroll
        for (int step = 0; step < kStages - 1; ++step) {
            tiles.begin_keys(chunk_at(step), tiles_of<Tiles>(step));
            tiles.begin_others(chunk_at(step), tiles_of<Tiles>(step));
            copy_async_commit();
        }
        if constexpr (kAhead) {
            copy_async_wait<kStages - 2>();
            cta_barrier();
        }
        for (int step = 0; step < num_chunks(); ++step) {
            copy_async_wait<kStages - 2 - kAhead>();
            cta_barrier();
            const int next = step + kStages - 1;
            // Copies start in two bursts, so that other warps' reads of shared memory wait less.
            tiles.begin_keys(chunk_at(next), tiles_of<Tiles>(next));
            if constexpr (kDeltaRule) cta_barrier();
            tiles.begin_others(chunk_at(next), tiles_of<Tiles>(next));
            copy_async_commit();
            write_state(slot(step), exchange.state(step));
            if constexpr (kDeltaRule) {
                cta_barrier();
                write_updates(slot(step), exchange.updates(step));
            }
        }
        copy_async_wait<0>();
    }

    // Calls visit(element of the state, key dimension, column of v) for those that exist.
    template <class Visit>
    FA_DEVICE void for_each_of_state(Visit visit) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
#pragma unroll
            for (int n = 0; n < kKeyDims / 8; ++n) {
                // Volta's state leaves few registers, so addresses are computed one after the other.
                if constexpr (!Arch::kAsyncCopy) warp_barrier();
#pragma unroll
                for (int i = 0; i < kElements; ++i) {
                    const int key = key_ + first_key() + Arch::value_column(n, i);
                    const int column = column_ + step * Arch::kStepRows + Arch::row(Arch::row_of_element(i));
                    if (key < p_.headdim_k && column < p_.headdim_v) visit(state_[step][n][i], key, column);
                }
            }
    }

    // The index of the sequence.
    FA_DEVICE int64_t index() const {
        return cta_index() / (static_cast<int64_t>(num_column_parts(p_) * kKeyParts) * p_.nheads);
    }

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

    FA_DEVICE void write_final_state() {
        if (p_.final_state == nullptr) return;
        float* to = p_.final_state + (index() * p_.nheads + head_) * p_.headdim_k * p_.headdim_v;
        for_each_of_state([&](float& x, int key, int column) { to[key * p_.headdim_v + column] = x; });
    }

    const ChunkParams& p_;
    const Sequence sequence_;
    const int head_, column_, key_, warp_;
    State state_;
};

// Runs a chain in the grid of kernels: CTAs of one head are neighbours, as they read the same tiles. `alone` does the work of
// `consume` and `produce` where there are no producer warps.
template <class OneChain>
FA_DEVICE void run_chain(const ChunkParams& p) {
    let_next_kernel_start();
    const int parts = num_column_parts(p) * kKeyParts;
    const int part = static_cast<int>(cta_index() % parts), index = static_cast<int>(cta_index() / parts);
    OneChain chain(p, index / p.nheads, index % p.nheads, part / kKeyParts * kColumns, part % kKeyParts * kHeaddim);
    if constexpr (!Arch::kAsyncCopy) {
        chain.alone();
    } else if (warp_index() < kStateWarps) {
        chain.consume();
    } else {
        chain.produce();
    }
}

}  // namespace fastattention
