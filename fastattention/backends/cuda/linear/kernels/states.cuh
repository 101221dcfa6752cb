// The sequential part of chunked linear attention: the state before each chunk, and the updates of the delta rule;
// outputs.cuh does the rest. A CTA has some columns of v and of a head's state, with all key dimensions or a part of them.
// Its warps divide the key dimensions of the state, which stays in their accumulators, and the tokens of everything else.
// With the results of prepare.cuh, and columns of v as rows of all operands but the last:
//
//     y = S K^T                        delta rule only: what the state S holds for the keys
//     u = beta (V - a y), u += u T^T   delta rule only: T is its inverse less I; otherwise u = V
//     S = a S + (a u) K                a: products of gates
//
// Warps exchange results in shared memory, as operands. With a gate for every key dimension, the two K are different, as
// both include their gates already (asking keys and keys), and the gates of S multiply its columns. Where copies are
// asynchronous, producer warps issue them and write scratch: instructions that access global memory wait for each other,
// and the chain of chunks must not.
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
constexpr bool kAskingKeys = kDeltaRule && kGatePerKey;  // tiles hold them after the keys that are added to the state
// Values of the next chunk become operands while this one's are multiplied: a chunk has one barrier.
constexpr bool kValuesAhead = Config::values_ahead;
static_assert(kStages >= (Arch::kAsyncCopy ? 2 + kValuesAhead : 1), "copies go on meanwhile");
static_assert((kCopyWarps > 0) == Arch::kAsyncCopy, "where copies go on meanwhile, warps of their own begin them");

// The threads that copy tiles and write scratch: all threads, or those of the last warps.
struct CopyTeam {
    static constexpr int kThreads = 32 * (kCopyWarps > 0 ? kCopyWarps : kWarps);
    static FA_DEVICE int index() { return thread_index() - (kCopyWarps > 0 ? 32 * kStateWarps : 0); }
};

// The tiles of a chunk in shared memory.
class ChunkTiles {
    static constexpr int kKeyRows = kChunk * (1 + kAskingKeys);
    using KeyCopy = TileCopy<Arch, CopyTeam, uint16_t, false, kKeyRows, kHeaddim>;
    using ValueCopy = TileCopy<Arch, CopyTeam, uint16_t, false, kChunk, kColumns>;
    // Asking keys follow at kAsking. Updates take their place, and may need more of it.
    static constexpr int kAsking = kAskingKeys ? kChunk * KeyCopy::kPitch : 0;
    static constexpr int kUpdatesEnd = kAskingKeys ? kAsking + kColumns * kTrianglePitch : 0;
    static constexpr int kInverse = KeyCopy::kBytes > kUpdatesEnd ? KeyCopy::kBytes : kUpdatesEnd,
                         kValues = kInverse + (kDeltaRule ? kTriangleBytes : 0), kFactorsAt = kValues + ValueCopy::kBytes;
    static constexpr int kFactorsOfSlot = kFactors * (kGatePerKey ? kKeyParts : 1);

public:
    static constexpr int kKeyPitch = KeyCopy::kPitch, kValuePitch = ValueCopy::kPitch;
    static constexpr int kBytes = kFactorsAt + kFactors * 4;

    // column, key: the CTA's first column of v and key dimension.
    FA_DEVICE ChunkTiles(const ChunkParams& p, const Sequence& sequence, int head, int column, int key)
        : keys_(token_source<kStateColumns, kKeyRows>(
              p, sequence, head, {p.k, p.k_stride_batch, p.k_stride_row, p.k_stride_head}, p.k_scaled, key)),
          inverse_(p.inverse + slot_of(p, sequence, head) * (kChunk * kChunk)),
          values_({p.v + sequence.offset(p.v_stride_batch, p.v_stride_row, p.v_stride_head, head) + column, p.v_stride_row,
                   sequence.length, p.columns_v - column}),
          factors_(p.factors + slot_of(p, sequence, head) * kFactorsOfSlot + (kGatePerKey ? key : 0)),
          length_(sequence.length) {}

    // Nothing is read for chunks after the last one.
    FA_DEVICE void begin_keys(int chunk, uint32_t to) {
        keys_.begin(chunk * kKeyRows, to);
        keys_.finish(to);
    }

    FA_DEVICE void begin_others(int chunk, uint32_t to) {
        const int first = chunk * kChunk;
        const bool valid = first < length_;
        if constexpr (kDeltaRule)
            copy_triangle<CopyTeam>(inverse_ + static_cast<int64_t>(chunk) * (kChunk * kChunk), valid, to + kInverse);
        values_.begin(first, to + kValues);
        values_.finish(to + kValues);
        copy_numbers<CopyTeam, kFactors>(factors_ + static_cast<int64_t>(chunk) * kFactorsOfSlot, valid, to + kFactorsAt);
    }

    static FA_DEVICE uint32_t keys(uint32_t tiles) { return tiles; }
    // The keys that the state is asked for. With a gate for every key dimension, updates later take their place.
    static FA_DEVICE uint32_t asking(uint32_t tiles) { return tiles + kAsking; }
    static FA_DEVICE uint32_t inverse(uint32_t tiles) { return tiles + kInverse; }
    static FA_DEVICE uint32_t values(uint32_t tiles) { return tiles + kValues; }
    static FA_DEVICE uint32_t factor(uint32_t tiles, int at) { return tiles + kFactorsAt + at * 4; }

private:
    KeyCopy keys_;
    const uint16_t* const inverse_;
    ValueCopy values_;
    const float* const factors_;
    const int length_;
};

// Shared memory after the tiles, by which warps exchange results. Its rows are columns of v.
class Exchange {
public:
    static constexpr int kStatePitch = ChunkTiles::kKeyPitch, kTokenPitch = kTrianglePitch;

private:
    // The next chunk's updates and state are stored while this chunk's are read, unless there is a barrier in between.
    static constexpr int kTurns = kValuesAhead ? 2 : 1;
    static constexpr int kOfState = kColumns * kStatePitch, kOfTokens = kColumns * kTokenPitch;
    static constexpr int kToState = kStages * ChunkTiles::kBytes + kTurns * kOfState,
                         kRest = kToState + (kAskingKeys ? 0 : kTurns * kOfTokens),
                         kUpdates = kRest + (kDeltaRule ? kOfTokens : 0);

    static_assert(kUpdates + (kDeltaRule && !kAskingKeys ? kOfTokens : 0) == Config::shared_bytes);

public:
    // As it is before a chunk.
    FA_DEVICE uint32_t state(int chunk) const { return at_ + kStages * ChunkTiles::kBytes + chunk % kTurns * kOfState; }
    // A chunk's updates, scaled to be added to the state.
    FA_DEVICE uint32_t to_state(int chunk) const {
        if constexpr (kAskingKeys) return updates(chunk);
        return at_ + kToState + chunk % kTurns * kOfTokens;
    }
    // The values less what the state before the chunk holds for the keys, times beta.
    FA_DEVICE uint32_t rest() const { return at_ + kRest; }
    FA_DEVICE uint32_t updates(int chunk) const {
        if constexpr (kAskingKeys) return ChunkTiles::asking(at_ + chunk % kStages * ChunkTiles::kBytes);
        return at_ + kUpdates;
    }

private:
    const uint32_t at_ = shared_memory();
};

class States {
public:
    // column, key: the CTA's first column of v, and its first key dimension.
    FA_DEVICE States(const ChunkParams& p, int sequence, int head, int column, int key)
        : p_(p), sequence_(sequence_at(p, sequence)), head_(head), column_(column), key_(key), warp_(warp_index()) {}

    FA_DEVICE void run() {
        if constexpr (!Arch::kAsyncCopy) {
            find_states_alone();
        } else if (warp_ < kStateWarps) {
            find_states();
        } else {
            copy();
        }
    }

private:
    // find_states and copy pass the same barriers. At a chunk's barrier its tiles and the results of other warps have
    // arrived, and no thread uses the previous tiles any more.
    FA_DEVICE void find_states() {
        read_state();
        if constexpr (kValuesAhead) {
            cta_barrier();
            leave_values(tiles_of(0), 0);
        }
        for (int chunk = 0; chunk < num_chunks(); ++chunk) {
            leave_state(chunk);
            cta_barrier();
            decay_state(tiles_of(chunk));
            if constexpr (kDeltaRule) find_updates(tiles_of(chunk), chunk);
            add_updates(tiles_of(chunk), chunk);
            if constexpr (kValuesAhead) leave_values(tiles_of(chunk + 1), chunk + 1);
        }
        write_final_state();
    }

    FA_DEVICE void copy() const {
        ChunkTiles tiles(p_, sequence_, head_, column_, key_);
#pragma unroll
        for (int chunk = 0; chunk < kStages - 1; ++chunk) {
            tiles.begin_keys(chunk, tiles_of(chunk));
            tiles.begin_others(chunk, tiles_of(chunk));
            copy_async_commit();
        }
        if constexpr (kValuesAhead) {
            copy_async_wait<kStages - 2>();
            cta_barrier();
        }
        for (int chunk = 0; chunk < num_chunks(); ++chunk) {
            copy_async_wait<kStages - 2 - kValuesAhead>();
            cta_barrier();
            const int next = chunk + kStages - 1;
            // Copies start in two bursts, so that other warps' reads of shared memory wait less.
            tiles.begin_keys(next, tiles_of(next));
            if constexpr (kDeltaRule) cta_barrier();
            tiles.begin_others(next, tiles_of(next));
            copy_async_commit();
            write_state(chunk);
            if constexpr (kDeltaRule) {
                cta_barrier();
                write_updates(chunk);
            }
        }
        copy_async_wait<0>();
    }

    // Does the work of both where there are no producer warps.
    FA_DEVICE void find_states_alone() {
        const uint32_t tiles = tiles_of(0);
        read_state();
        for (int chunk = 0; chunk < num_chunks(); ++chunk) {
            if (chunk > 0) cta_barrier();
            // Addresses are computed anew for each chunk: the state leaves few registers to keep them.
            ChunkTiles copies(p_, sequence_, opaque(head_), opaque(column_), opaque(key_));
            copies.begin_keys(chunk, tiles);
            copies.begin_others(chunk, tiles);
            leave_state(chunk);
            cta_barrier();
            write_state(chunk);
            decay_state(tiles);
            if constexpr (kDeltaRule) {
                find_updates(tiles, chunk);
                write_updates(chunk);
            } else {
                leave_values(tiles, chunk);
                cta_barrier();
            }
            add_updates(tiles, chunk);
        }
        write_final_state();
    }

    static constexpr int kElements = Arch::kElements;
    using State = float[kSteps][kKeyDims / 8][kElements];
    using Tokens = float[kSteps][kTokens / 8][kElements];  // one column per token
    using UpdateRows = typename Arch::template Rows<kSteps, kChunk>;

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

    static FA_DEVICE uint32_t tiles_of(int chunk) { return shared_memory() + chunk % kStages * ChunkTiles::kBytes; }

    // The warp's first key dimension and its first token.
    FA_DEVICE int first_key() const { return warp_ * kKeyDims; }
    FA_DEVICE int first_token() const { return warp_ * kTokens; }

    FA_DEVICE int num_chunks() const { return sequence_.num_chunks(); }
    FA_DEVICE int64_t slot(int chunk) const { return slot_of(p_, sequence_, head_) + chunk; }

    // Computes the updates of the delta rule from the state in shared memory. After the last barrier they are there too.
    FA_DEVICE void find_updates(uint32_t tiles, int chunk) const {
        Tokens values, x = {};
        read_values(values, tiles);
        const auto betas = token_factors(kBetas, tiles);
        if constexpr (kAskingKeys) {
            ask(x, tiles);
        } else {
            const auto gates = token_factors(kKeysOfState, tiles);
            ask(x, tiles);
            scale(x, gates);
        }
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
#pragma unroll
            for (int n = 0; n < kTokens / 8; ++n)
#pragma unroll
                for (int i = 0; i < kElements; ++i) x[step][n][i] = values[step][n][i] - x[step][n][i];
        scale(x, betas);
        leave_tokens(x, exchange_.rest());
        cta_barrier();
        UpdateRows rest;
        rest.load(exchange_.rest());
        Arch::multiply_rows(x, rest, ChunkTiles::inverse(tiles) + first_token() * kTrianglePitch);
        leave_tokens(x, exchange_.updates(chunk));
        if constexpr (!kAskingKeys) {
            scale(x, token_factors(kKeysToState, tiles));
            leave_tokens(x, exchange_.to_state(chunk));
        }
        cta_barrier();
    }

    // Adds what the state holds for the keys of the warp's tokens.
    FA_DEVICE void ask(Tokens& x, uint32_t tiles) const {
        typename Arch::template Rows<kSteps, kHeaddim> state;
        state.load(exchange_.state(0));
        Arch::multiply_rows(x, state, ChunkTiles::asking(tiles) + first_token() * ChunkTiles::kKeyPitch);
    }

    // Without the delta rule, the warp's values are the updates.
    FA_DEVICE void leave_values(uint32_t tiles, int chunk) const {
        Tokens x;
        read_values(x, tiles);
        if constexpr (!kGatePerKey) scale(x, token_factors(kKeysToState, tiles));
        leave_tokens(x, exchange_.to_state(chunk));
    }

    // The factors of the warp's tokens.
    FA_DEVICE ColumnFactors<kTokens / 8> token_factors(FactorPlane plane, uint32_t tiles) const {
        return ColumnFactors<kTokens / 8>([&](int n, int i) {
            return ChunkTiles::factor(tiles, factor_of_token(plane, first_token() + Arch::score_column(n, i)));
        });
    }

    FA_DEVICE void read_values(Tokens& x, uint32_t tiles) const {
        Arch::template read_transposed<kColumns>(x, ChunkTiles::values(tiles) + first_token() * ChunkTiles::kValuePitch);
    }

    FA_DEVICE void leave_tokens(const Tokens& x, uint32_t to) const {
        Arch::template leave_scores<Exchange::kTokenPitch>(x, to + first_token() * 2);
    }

    FA_DEVICE void leave_state(int chunk) const {
        Arch::template leave_values<Exchange::kStatePitch>(state_, exchange_.state(chunk) + first_key() * 2);
    }

    // Writes the state that warps have stored in shared memory to scratch.
    FA_DEVICE void write_state(int chunk) const {
        write_rows<kHeaddim, Exchange::kStatePitch>(
            exchange_.state(chunk), p_.states + (slot(chunk) * p_.columns_v + column_) * kStateColumns + key_, kStateColumns);
    }

    FA_DEVICE void write_updates(int chunk) const {
        write_rows<kChunk, Exchange::kTokenPitch>(exchange_.updates(chunk),
                                                  p_.updates + (slot(chunk) * p_.columns_v + column_) * kChunk, kChunk);
    }

    // Writes rows of kCount elements, one for each column of v. stride: of rows in global memory.
    template <int kCount, int kPitch>
    FA_DEVICE void write_rows(uint32_t from, uint16_t* to, int stride) const {
        constexpr int kPieces = kCount / 8, kAll = kColumns * kPieces;
#pragma unroll
        for (int i = 0; i < kAll; i += CopyTeam::kThreads) {
            const int piece = i + CopyTeam::index(), row = piece / kPieces, at = piece % kPieces * 8;
            if ((kAll % CopyTeam::kThreads == 0 || piece < kAll) && column_ + row < p_.columns_v)
                store_global_128(to + row * stride + at, load_shared_128(from + row * kPitch + at * 2));
        }
    }

    FA_DEVICE void add_updates(uint32_t tiles, int chunk) {
        UpdateRows updates;
        updates.load(exchange_.to_state(chunk));
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
    const Exchange exchange_;
    State state_;
};

}  // namespace fastattention

extern "C" FA_KERNEL void FA_LAUNCH_BOUNDS(fastattention::kThreads, fastattention::Config::min_ctas)
    fastattention_linear_states(FA_PARAMETER fastattention::ChunkParams params) {
    using namespace fastattention;
    let_next_kernel_start();
    // CTAs of one head are neighbours: they read the same tiles.
    const int parts = num_column_parts(params) * kKeyParts;
    const int part = static_cast<int>(cta_index() % parts), index = static_cast<int>(cta_index() / parts);
    States(params, index / params.nheads, index % params.nheads, part / kKeyParts * kColumns, part % kKeyParts * kHeaddim)
        .run();
}
