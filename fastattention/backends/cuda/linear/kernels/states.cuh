// The sequential part of chunked linear attention: the state before each chunk, and the updates of the delta rule;
// outputs.cuh does the rest. With the results of prepare.cuh, and columns of v as rows of all operands but the last:
//
//     y = S K^T                        delta rule only: what the state S holds for the keys
//     u = beta (V - a y), u += u T^T   delta rule only: T is its inverse less I; otherwise u = V
//     S = a S + (a u) K                a: products of gates
//
// Warps exchange results in shared memory, as operands. With a gate for every key dimension, the two K are different, as
// both include their gates already (asking keys and keys), and the gates of S multiply its columns.
//
// Without the delta rule, the gradient of the state is such a state itself (kReversed): from the last chunk to the first,
// queries take the place of keys, and gradients of outputs that of V. state_gradients.cuh is for the delta rule.
#pragma once

#include "chain.cuh"

namespace fastattention {

static_assert(!kReversed || !kDeltaRule, "the delta rule has a chain of its own");
constexpr bool kAskingKeys = kDeltaRule && kGatePerKey;  // tiles hold them after the keys that are added to the state
// Values of the next chunk become operands while this one's are multiplied: a chunk has one barrier.
constexpr bool kValuesAhead = Config::values_ahead;
static_assert(kStages >= (Arch::kAsyncCopy ? 2 + kValuesAhead : 1), "copies go on meanwhile");

// The tiles of a chunk in shared memory.
class ChunkTiles {
    static constexpr int kKeyRows = kChunk * (1 + kAskingKeys);
    using KeyCopy = TileCopy<Arch, CopyTeam, uint16_t, false, kKeyRows, kHeaddim>;
    using ValueCopy = TileCopy<Arch, CopyTeam, uint16_t, false, kChunk, kColumns>;
    // Asking keys follow at kAsking. Updates take their place, and may need more of it.
    static constexpr int kAsking = kAskingKeys ? kChunk * KeyCopy::kPitch : 0;
    static constexpr int kUpdatesEnd = kAskingKeys ? kAsking + kExchangedTokens : 0;
    static constexpr int kInverse = KeyCopy::kBytes > kUpdatesEnd ? KeyCopy::kBytes : kUpdatesEnd,
                         kValues = kInverse + (kDeltaRule ? kTriangleBytes : 0), kFactorsAt = kValues + ValueCopy::kBytes;
    static constexpr int kFactorsOfSlot = kFactors * (kGatePerKey ? kKeyParts : 1);

public:
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
            copy_square<CopyTeam, true>(inverse_ + static_cast<int64_t>(chunk) * (kChunk * kChunk), valid, to + kInverse);
        values_.begin(first, to + kValues);
        values_.finish(to + kValues);
        copy_numbers<CopyTeam, kFactors>(factors_ + static_cast<int64_t>(chunk) * kFactorsOfSlot, valid, to + kFactorsAt);
    }

    static FA_DEVICE uint32_t keys(uint32_t tiles) { return tiles; }
    // The keys that the state is asked for. With a gate for every key dimension, updates later take their place.
    static FA_DEVICE uint32_t asking(uint32_t tiles) { return tiles + kAsking; }
    static FA_DEVICE uint32_t inverse(uint32_t tiles) { return tiles + kInverse; }
    static FA_DEVICE uint32_t values(uint32_t tiles) { return tiles + kValues; }
    static FA_DEVICE uint32_t factors(uint32_t tiles) { return tiles + kFactorsAt; }

private:
    KeyCopy keys_;
    const uint16_t* const inverse_;
    ValueCopy values_;
    const float* const factors_;
    const int length_;
};

// Shared memory after the tiles, by which warps exchange results.
class Exchange {
    // The next chunk's updates and state are stored while this chunk's are read, unless there is a barrier in between.
    static constexpr int kTurns = kValuesAhead ? 2 : 1;
    static constexpr int kToState = kStages * ChunkTiles::kBytes + kTurns * kExchangedState,
                         kRest = kToState + (kAskingKeys ? 0 : kTurns * kExchangedTokens),
                         kUpdates = kRest + (kDeltaRule ? kExchangedTokens : 0);

    static_assert(kUpdates + (kDeltaRule && !kAskingKeys ? kExchangedTokens : 0) == Config::shared_bytes);

public:
    // As it is before a chunk.
    FA_DEVICE uint32_t state(int chunk) const {
        return at_ + kStages * ChunkTiles::kBytes + chunk % kTurns * kExchangedState;
    }
    // A chunk's updates, scaled to be added to the state.
    FA_DEVICE uint32_t to_state(int chunk) const {
        if constexpr (kAskingKeys) return updates(chunk);
        return at_ + kToState + chunk % kTurns * kExchangedTokens;
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

class States : Chain {
public:
    using Chain::Chain;

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
    // Functions count chunks in the order in which the chain takes them. There is none with this index after the last one.
    FA_DEVICE int chunk_at(int index) const { return !kReversed || index >= num_chunks() ? index : num_chunks() - 1 - index; }

    // find_states and copy pass the same barriers. At a chunk's barrier its tiles and the results of other warps have
    // arrived, and no thread uses the previous tiles any more.
    FA_DEVICE void find_states() {
        read_state();
        if constexpr (kValuesAhead) {
            cta_barrier();
            leave_values(tiles_of(0), 0);
        }
        for (int chunk = 0; chunk < num_chunks(); ++chunk) {
            leave_state(exchange_.state(chunk));
            cta_barrier();
            decay_state(ChunkTiles::factors(tiles_of(chunk)));
            if constexpr (kDeltaRule) find_updates(tiles_of(chunk), chunk);
            add_to_state(exchange_.to_state(chunk), ChunkTiles::keys(tiles_of(chunk)));
            if constexpr (kValuesAhead) leave_values(tiles_of(chunk + 1), chunk + 1);
        }
        write_final_state();
    }

    FA_DEVICE void copy() const {
        ChunkTiles tiles(p_, sequence_, head_, column_, key_);
#pragma unroll
        for (int chunk = 0; chunk < kStages - 1; ++chunk) {
            tiles.begin_keys(chunk_at(chunk), tiles_of(chunk));
            tiles.begin_others(chunk_at(chunk), tiles_of(chunk));
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
            tiles.begin_keys(chunk_at(next), tiles_of(next));
            if constexpr (kDeltaRule) cta_barrier();
            tiles.begin_others(chunk_at(next), tiles_of(next));
            copy_async_commit();
            write_state(slot(chunk_at(chunk)), exchange_.state(chunk));
            if constexpr (kDeltaRule) {
                cta_barrier();
                write_updates(slot(chunk_at(chunk)), exchange_.updates(chunk));
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
            copies.begin_keys(chunk_at(chunk), tiles);
            copies.begin_others(chunk_at(chunk), tiles);
            leave_state(exchange_.state(chunk));
            cta_barrier();
            write_state(slot(chunk_at(chunk)), exchange_.state(chunk));
            decay_state(ChunkTiles::factors(tiles));
            if constexpr (kDeltaRule) {
                find_updates(tiles, chunk);
                write_updates(slot(chunk_at(chunk)), exchange_.updates(chunk));
            } else {
                leave_values(tiles, chunk);
                cta_barrier();
            }
            add_to_state(exchange_.to_state(chunk), ChunkTiles::keys(tiles));
        }
        write_final_state();
    }

    static FA_DEVICE uint32_t tiles_of(int chunk) { return shared_memory() + chunk % kStages * ChunkTiles::kBytes; }

    // Computes the updates of the delta rule from the state in shared memory. After the last barrier they are there too.
    FA_DEVICE void find_updates(uint32_t tiles, int chunk) const {
        const uint32_t factors = ChunkTiles::factors(tiles);
        Tokens values, x = {};
        read_tokens(values, ChunkTiles::values(tiles));
        const auto betas = token_factors(kBetas, factors);
        if constexpr (kAskingKeys) {
            ask(x, exchange_.state(0), ChunkTiles::asking(tiles));
        } else {
            const auto gates = token_factors(kKeysOfState, factors);
            ask(x, exchange_.state(0), ChunkTiles::asking(tiles));
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
        TokenRows rest;
        rest.load(exchange_.rest());
        Arch::multiply_rows(x, rest, ChunkTiles::inverse(tiles) + first_token() * kTrianglePitch);
        leave_tokens(x, exchange_.updates(chunk));
        if constexpr (!kAskingKeys) {
            scale(x, token_factors(kKeysToState, factors));
            leave_tokens(x, exchange_.to_state(chunk));
        }
        cta_barrier();
    }

    // Without the delta rule, the warp's values are the updates.
    FA_DEVICE void leave_values(uint32_t tiles, int chunk) const {
        Tokens x;
        read_tokens(x, ChunkTiles::values(tiles));
        if constexpr (!kGatePerKey)
            scale(x, token_factors(kReversed ? kQueriesOfState : kKeysToState, ChunkTiles::factors(tiles)));
        leave_tokens(x, exchange_.to_state(chunk));
    }

    const Exchange exchange_;
};

}  // namespace fastattention

extern "C" FA_KERNEL void FA_LAUNCH_BOUNDS(fastattention::kThreads, fastattention::Config::min_ctas)
    fastattention_linear_states(FA_PARAMETER fastattention::ChunkParams params) {
    fastattention::run_chain<fastattention::States>(params);
}
