// The sequential part of gradients of delta rules: the gradient of the state after each chunk, from the last chunk to the
// first, and those of updates before beta multiplied them. With the gradient G of the state, outputs' gradients dO, and
// columns of v as rows of all operands but the last:
//
//     x = dU + a G K^T, x += x T     dU = dO A, of outputs.cuh; T: the inverse less I of the delta rule
//     G = a G + (a dO) Q - (a beta x) K
//
// With a gate for every key dimension, Q and both K include their gates: G asks the keys that the chunk adds to the state,
// and asking keys are added to it.
#pragma once

#include "chain.cuh"

namespace fastattention {

static_assert(kReversed && kDeltaRule, "states.cuh serves other rules");
static_assert(kStages >= (Arch::kAsyncCopy ? 2 : 1), "copies go on meanwhile");

// The tiles of a chunk in shared memory.
class GradientTiles {
    static constexpr int kKeyTiles = 1 + kGatePerKey;  // keys, then asking keys if they differ
    using KeyCopy = TileCopy<Arch, CopyTeam, uint16_t, false, kKeyTiles * kChunk, kHeaddim>;
    using QueryCopy = TileCopy<Arch, CopyTeam, uint16_t, false, kChunk, kHeaddim>;
    using ValueCopy = TileCopy<Arch, CopyTeam, uint16_t, false, kChunk, kColumns>;
    static constexpr int kAsking = (kKeyTiles - 1) * kChunk * KeyCopy::kPitch, kQueries = KeyCopy::kBytes,
                         kInverse = kQueries + QueryCopy::kBytes, kUpdates = kInverse + kTriangleBytes,
                         kOutputs = kUpdates + ValueCopy::kBytes, kFactorsAt = kOutputs + ValueCopy::kBytes;

public:
    static constexpr int kBytes = kFactorsAt + kFactors * 4;

    // column: the CTA's first of v.
    FA_DEVICE GradientTiles(const ChunkParams& p, const Sequence& sequence, int head, int column)
        : keys_(token_source<kHeaddim, kKeyTiles * kChunk>(
              p, sequence, head, {p.k, p.k_stride_batch, p.k_stride_row, p.k_stride_head}, p.k_scaled, 0)),
          queries_(token_source<kHeaddim>(p, sequence, head, {p.q, p.q_stride_batch, p.q_stride_row, p.q_stride_head},
                                          p.q_scaled, 0)),
          inverse_(p.turned_inverse + slot_of(p, sequence, head) * (kChunk * kChunk)),
          updates_(value_rows(p, sequence, head, p.v, column)),
          outputs_(value_rows(p, sequence, head, p.dout, column)),
          factors_(p.factors + slot_of(p, sequence, head) * kFactors),
          length_(sequence.length) {}

    FA_DEVICE void begin_keys(int chunk, uint32_t to) {
        keys_.begin(chunk * kKeyTiles * kChunk, to);
        keys_.finish(to);
    }

    // Nothing is read for chunks after the last one.
    FA_DEVICE void begin_others(int chunk, uint32_t to) {
        const int first = chunk * kChunk;
        const bool valid = first < length_;
        copy_square<CopyTeam>(inverse_ + static_cast<int64_t>(chunk) * (kChunk * kChunk), valid, to + kInverse);
        updates_.begin(first, to + kUpdates);
        updates_.finish(to + kUpdates);
        outputs_.begin(first, to + kOutputs);
        outputs_.finish(to + kOutputs);
        queries_.begin(first, to + kQueries);
        queries_.finish(to + kQueries);
        copy_numbers<CopyTeam, kFactors>(factors_ + static_cast<int64_t>(chunk) * kFactors, valid, to + kFactorsAt);
    }

    static FA_DEVICE uint32_t keys(uint32_t tiles) { return tiles; }
    static FA_DEVICE uint32_t asking(uint32_t tiles) { return tiles + kAsking; }
    static FA_DEVICE uint32_t queries(uint32_t tiles) { return tiles + kQueries; }
    static FA_DEVICE uint32_t inverse(uint32_t tiles) { return tiles + kInverse; }
    // Gradients of updates as far as outputs of the chunk give them, and those of outputs.
    static FA_DEVICE uint32_t updates(uint32_t tiles) { return tiles + kUpdates; }
    static FA_DEVICE uint32_t outputs(uint32_t tiles) { return tiles + kOutputs; }
    static FA_DEVICE uint32_t factors(uint32_t tiles) { return tiles + kFactorsAt; }

private:
    // Rows of a tensor as out has them, contiguous.
    static FA_DEVICE SourceRows<uint16_t, false> value_rows(const ChunkParams& p, const Sequence& sequence, int head,
                                                            const uint16_t* base, int column) {
        const int stride = p.nheads * p.columns_v;
        const int64_t row = static_cast<int64_t>(sequence.batch) * p.seqlen + sequence.first;
        return {base + row * stride + head * p.columns_v + column, stride, sequence.length, p.columns_v - column};
    }

    KeyCopy keys_;
    QueryCopy queries_;
    const uint16_t* const inverse_;
    ValueCopy updates_, outputs_;
    const float* const factors_;
    const int length_;
};

// Shared memory after the tiles, by which warps exchange results.
class GradientExchange {
    static constexpr int kState = kStages * GradientTiles::kBytes, kRest = kState + kExchangedState,
                         kUpdates = kRest + kExchangedTokens, kToState = kUpdates + kExchangedTokens,
                         kOutputs = kToState + kExchangedTokens;
    static_assert(kOutputs + kExchangedTokens == Config::shared_bytes);

public:
    // A step uses them before the next one stores its own: there are barriers in between.
    FA_DEVICE uint32_t state(int = 0) const { return at_ + kState; }
    FA_DEVICE uint32_t updates(int = 0) const { return at_ + kUpdates; }
    FA_DEVICE uint32_t rest() const { return at_ + kRest; }
    // Updates and gradients of outputs, scaled to be added to the state.
    FA_DEVICE uint32_t to_state() const { return at_ + kToState; }
    FA_DEVICE uint32_t outputs() const { return at_ + kOutputs; }

private:
    const uint32_t at_ = shared_memory();
};

class StateGradients : Chain {
public:
    using Chain::Chain;

    // There are three barriers for each step. At the first its tiles and the state have arrived, and no thread uses the
    // previous tiles any more.
    FA_DEVICE void consume() {
        read_state();
        for (int step = 0; step < num_chunks(); ++step) {
            leave_state(exchange_.state());
            cta_barrier();
            add_chunk(tiles_of<GradientTiles>(step));
        }
        write_final_state();
    }

    FA_DEVICE void produce() const { copy_chunks<false>(GradientTiles(p_, sequence_, head_, column_), exchange_); }

    FA_DEVICE void alone() {
        const uint32_t tiles = tiles_of<GradientTiles>(0);
        read_state();
        for (int step = 0; step < num_chunks(); ++step) {
            if (step > 0) cta_barrier();
            // Addresses are computed anew for each chunk: the state leaves few registers to keep them.
            GradientTiles copies(p_, sequence_, opaque(head_), opaque(column_));
            copies.begin_keys(chunk_at(step), tiles);
            copies.begin_others(chunk_at(step), tiles);
            leave_state(exchange_.state());
            cta_barrier();
            write_state(slot(step), exchange_.state());
            add_chunk(tiles);
            write_updates(slot(step), exchange_.updates());
        }
        write_final_state();
    }

private:
    // Between the last two barriers, warps add what queries give: it does not wait for updates.
    FA_DEVICE void add_chunk(uint32_t tiles) {
        const uint32_t factors = GradientTiles::factors(tiles);
        decay_state(factors);
        Tokens x = {};
        ask(x, exchange_.state(), GradientTiles::keys(tiles));
        if constexpr (!kGatePerKey) scale(x, token_factors(kKeysToState, factors));
        add_tokens(x, GradientTiles::updates(tiles));
        leave_tokens(x, exchange_.rest());
        leave_outputs(tiles);
        cta_barrier();
        TokenRows rest;
        rest.load(exchange_.rest());
        Arch::multiply_rows(x, rest, GradientTiles::inverse(tiles) + first_token() * kTrianglePitch);
        leave_tokens(x, exchange_.updates());
        negate(x);
        scale(x, token_factors(kBetas, factors));
        if constexpr (!kGatePerKey) scale(x, token_factors(kKeysOfState, factors));
        leave_tokens(x, exchange_.to_state());
        add_to_state(exchange_.outputs(), GradientTiles::queries(tiles));
        cta_barrier();
        add_to_state(exchange_.to_state(), GradientTiles::asking(tiles));
    }

    FA_DEVICE void leave_outputs(uint32_t tiles) const {
        Tokens outputs;
        read_tokens(outputs, GradientTiles::outputs(tiles));
        if constexpr (!kGatePerKey) scale(outputs, token_factors(kQueriesOfState, GradientTiles::factors(tiles)));
        leave_tokens(outputs, exchange_.outputs());
    }

    FA_DEVICE void add_tokens(Tokens& x, uint32_t tile) const {
        Tokens given;
        read_tokens(given, tile);
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
#pragma unroll
            for (int n = 0; n < kTokens / 8; ++n)
#pragma unroll
                for (int i = 0; i < kElements; ++i) x[step][n][i] += given[step][n][i];
    }

    static FA_DEVICE void negate(Tokens& x) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
#pragma unroll
            for (int n = 0; n < kTokens / 8; ++n)
#pragma unroll
                for (int i = 0; i < kElements; ++i) x[step][n][i] = -x[step][n][i];
    }

    const GradientExchange exchange_;
};

}  // namespace fastattention

extern "C" FA_KERNEL void FA_LAUNCH_BOUNDS(fastattention::kThreads, fastattention::Config::min_ctas)
    fastattention_linear_state_gradients(FA_PARAMETER fastattention::ChunkParams params) {
    fastattention::run_chain<fastattention::StateGradients>(params);
}
