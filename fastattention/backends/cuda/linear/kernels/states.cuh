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
    FA_DEVICE uint32_t state(int step) const { return at_ + kStages * ChunkTiles::kBytes + step % kTurns * kExchangedState; }
    // A chunk's updates, scaled to be added to the state.
    FA_DEVICE uint32_t to_state(int step) const {
        if constexpr (kAskingKeys) return updates(step);
        return at_ + kToState + step % kTurns * kExchangedTokens;
    }
    // The values less what the state before the chunk holds for the keys, times beta.
    FA_DEVICE uint32_t rest() const { return at_ + kRest; }
    FA_DEVICE uint32_t updates(int step) const {
        if constexpr (kAskingKeys) return ChunkTiles::asking(at_ + step % kStages * ChunkTiles::kBytes);
        return at_ + kUpdates;
    }

private:
    const uint32_t at_ = shared_memory();
};

class States : Chain {
public:
    using Chain::Chain;

    // At the barrier of a step its tiles and the results of other warps have arrived, and no thread uses the previous tiles
    // any more.
    FA_DEVICE void consume() {
        read_state();
        if constexpr (kValuesAhead) {
            cta_barrier();
            leave_values(tiles_of<ChunkTiles>(0), 0);
        }
        for (int step = 0; step < num_chunks(); ++step) {
            const uint32_t tiles = tiles_of<ChunkTiles>(step);
            leave_state(exchange_.state(step));
            cta_barrier();
            decay_state(ChunkTiles::factors(tiles));
            if constexpr (kDeltaRule) find_updates(tiles, step);
            add_to_state(exchange_.to_state(step), ChunkTiles::keys(tiles));
            if constexpr (kValuesAhead) leave_values(tiles_of<ChunkTiles>(step + 1), step + 1);
        }
        write_final_state();
    }

    FA_DEVICE void produce() const { copy_chunks<kValuesAhead>(ChunkTiles(p_, sequence_, head_, column_, key_), exchange_); }

    FA_DEVICE void alone() {
        const uint32_t tiles = tiles_of<ChunkTiles>(0);
        read_state();
        for (int step = 0; step < num_chunks(); ++step) {
            if (step > 0) cta_barrier();
            // Addresses are computed anew for each chunk: the state leaves few registers to keep them.
            ChunkTiles copies(p_, sequence_, opaque(head_), opaque(column_), opaque(key_));
            copies.begin_keys(chunk_at(step), tiles);
            copies.begin_others(chunk_at(step), tiles);
            leave_state(exchange_.state(step));
            cta_barrier();
            write_state(slot(step), exchange_.state(step));
            decay_state(ChunkTiles::factors(tiles));
            if constexpr (kDeltaRule) {
                find_updates(tiles, step);
                write_updates(slot(step), exchange_.updates(step));
            } else {
                leave_values(tiles, step);
                cta_barrier();
            }
            add_to_state(exchange_.to_state(step), ChunkTiles::keys(tiles));
        }
        write_final_state();
    }

private:
    // Computes the updates of the delta rule from the state in shared memory. After the last barrier they are there too.
    FA_DEVICE void find_updates(uint32_t tiles, int step) const {
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
        repair(x, ChunkTiles::inverse(tiles));
        leave_tokens(x, exchange_.updates(step));
        if constexpr (!kAskingKeys) {
            scale(x, token_factors(kKeysToState, factors));
            leave_tokens(x, exchange_.to_state(step));
        }
        cta_barrier();
    }

    // Computes updates that are not finite again, each from its own token and earlier ones.
    FA_DEVICE void repair(Tokens& x, uint32_t inverse) const {
        float sum = 0.0f;
        visit_tokens(x, [&](float& update, int, int) { sum += update; });
        if (is_finite(sum)) return;
        visit_tokens(x, [&](float& update, int column, int token) {
            if (is_finite(update)) return;
            const uint32_t rest = exchange_.rest() + column * kTokenPitch;
            update = load_operand(rest + token * 2) + sum_one_by_one(token, rest, inverse + token * kTrianglePitch, 2);
        });
    }

    // Calls visit(element, column of v, token).
    template <class Visit>
    FA_DEVICE void visit_tokens(Tokens& x, Visit visit) const {
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
#pragma unroll
            for (int n = 0; n < kTokens / 8; ++n)
#pragma unroll
                for (int i = 0; i < kElements; ++i)
                    visit(x[step][n][i], step * Arch::kStepRows + Arch::row(Arch::row_of_element(i)),
                          first_token() + Arch::score_column(n, i));
    }

    // Without the delta rule, the warp's values are the updates.
    FA_DEVICE void leave_values(uint32_t tiles, int step) const {
        Tokens x;
        read_tokens(x, ChunkTiles::values(tiles));
        if constexpr (!kGatePerKey)
            scale(x, token_factors(kReversed ? kQueriesOfState : kKeysToState, ChunkTiles::factors(tiles)));
        leave_tokens(x, exchange_.to_state(step));
    }

    const Exchange exchange_;
};

}  // namespace fastattention

extern "C" FA_KERNEL void FA_LAUNCH_BOUNDS(fastattention::kThreads, fastattention::Config::min_ctas)
    fastattention_linear_states(FA_PARAMETER fastattention::ChunkParams params) {
    fastattention::run_chain<fastattention::States>(params);
}
