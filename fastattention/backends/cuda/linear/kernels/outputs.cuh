// Computes the outputs of chunked linear attention, for all chunks at once. A CTA has a chunk of a head and some columns of
// v. Its warps divide the chunk's queries, and columns if there are more warps than steps of queries. With the state S
// before the chunk and the updates u from states.cuh, and the scores A:
//
//     o = a Q S^T + A u    a: products of gates; u = V without the delta rule
//
// With a gate for every key dimension, Q includes the gates already.
//
// Gradients of updates are such outputs themselves (kReversed): keys take the place of queries, gradients of states and of
// outputs that of states and updates, and A is transposed. With the delta rule they are only A u: state_gradients.cuh adds
// the rest.
#pragma once

#include "chunk_tiles.cuh"

namespace fastattention {

constexpr int kQueryGroups = kChunk / Arch::kStepRows;
constexpr int kWarpOutColumns = kColumns * kQueryGroups / kWarps;
static_assert(kWarpOutColumns % 16 == 0, "warps have whole accumulators");
constexpr bool kAsksState = !kReversed || !kDeltaRule;

class Outputs {
    using QueryCopy = TileCopy<Arch, WholeCta, uint16_t, false, kChunk, kHeaddim>;
    using StateCopy = TileCopy<Arch, WholeCta, uint16_t, false, kColumns, kHeaddim>;
    using UpdateCopy = TileCopy<Arch, WholeCta, uint16_t, false, kChunk, kColumns>;
    using Out = float[1][kWarpOutColumns / 8][Arch::kElements];

    // Without the state, scores come first.
    static constexpr int kStatesAt = kAsksState ? QueryCopy::kBytes : 0,
                         kScoresAt = kStatesAt + (kAsksState ? StateCopy::kBytes : 0),
                         kUpdatesAt = kScoresAt + kTriangleBytes;
    // Results are staged in the memory of queries, or of updates.
    static constexpr int kOutPitch = pitch_of<2>(kColumns), kOutAt = kAsksState ? 0 : kUpdatesAt;
    static_assert(kChunk * kOutPitch <= (kAsksState ? QueryCopy::kBytes : UpdateCopy::kBytes), "there is room");

    static_assert(kUpdatesAt + UpdateCopy::kBytes == Config::shared_bytes);

public:
    // column: the CTA's first of v.
    FA_DEVICE Outputs(const ChunkParams& p, const Sequence& sequence, int chunk, int head, int column)
        : p_(p),
          sequence_(sequence),
          chunk_(chunk),
          head_(head),
          column_(column),
          query_(warp_index() % kQueryGroups * Arch::kStepRows),
          out_column_(warp_index() / kQueryGroups * kWarpOutColumns) {}

    FA_DEVICE void run() const {
        const int64_t slot = slot_of(p_, sequence_, head_) + chunk_;
        Out out = {};
        if constexpr (kAsksState) copy_state(slot);
        if constexpr (kReversed) {
            copy_triangle_transposed<WholeCta>(p_.scores + slot * (kChunk * kChunk), at_ + kScoresAt);
        } else {
            copy_square<WholeCta, true>(p_.scores + slot * (kChunk * kChunk), true, at_ + kScoresAt);
        }
        copy_values(slot);
        if constexpr (Arch::kAsyncCopy) copy_async_commit();
        if constexpr (kAsksState) ask_state(out, slot);

        if constexpr (Arch::kAsyncCopy) copy_async_wait<0>();
        cta_barrier();
        typename Arch::template Rows<1, kChunk> scores;
        scores.load(at_ + kScoresAt + query_ * kTrianglePitch);
        const typename Arch::template Values<kColumns> values(at_ + kUpdatesAt + out_column_ * 2);
        if constexpr (!kReversed) {
            Out own = {};
            add_scores(own, scores, values);
            add_own(out, own);
        } else {
            add_scores(out, scores, values);
        }
        if constexpr (!kAsksState) cta_barrier();  // all warps have read updates
        const uint32_t to = at_ + kOutAt + query_ * kOutPitch + out_column_ * 2;
        Arch::template leave_values<kOutPitch>(out, to);
        warp_barrier();
        write_out(to);
    }

private:
    template <class Scores, class Values>
    static FA_DEVICE void add_scores(Out& out, const Scores& scores, const Values& values) {
#pragma unroll
        for (int group = 0; group < kChunk / Arch::kKeyStep; ++group) values.accumulate(out, scores, group);
    }

    // Adds what the chunk's own updates give.
    FA_DEVICE void add_own(Out& out, Out& own) const {
        float sum = 0.0f;
        visit_results(own, [&](float& x, int, int) { sum += x; });
        if (!is_finite(sum))
            visit_results(own, [&](float& x, int query, int column) {
                if (is_finite(x)) return;
                x = sum_one_by_one(query + 1, at_ + kScoresAt + query * kTrianglePitch, at_ + kUpdatesAt + column * 2,
                                   UpdateCopy::kPitch);
            });
#pragma unroll
        for (int n = 0; n < kWarpOutColumns / 8; ++n)
#pragma unroll
            for (int i = 0; i < Arch::kElements; ++i) out[0][n][i] += own[0][n][i];
    }

    // Calls visit(result, query, column of the CTA).
    template <class Visit>
    FA_DEVICE void visit_results(Out& x, Visit visit) const {
#pragma unroll
        for (int n = 0; n < kWarpOutColumns / 8; ++n)
#pragma unroll
            for (int i = 0; i < Arch::kElements; ++i)
                visit(x[0][n][i], query_ + Arch::row(Arch::row_of_element(i)), out_column_ + Arch::value_column(n, i));
    }

    FA_DEVICE void copy_state(int64_t slot) const {
        copy_tile(QueryCopy(token_source<kHeaddim>(
                      p_, sequence_, head_, {p_.q, p_.q_stride_batch, p_.q_stride_row, p_.q_stride_head}, p_.q_scaled, 0)),
                  chunk_ * kChunk, at_);
        copy_tile(
            StateCopy({p_.states + (slot * p_.columns_v + column_) * kHeaddim, kHeaddim, p_.columns_v - column_, kHeaddim}),
            0, at_ + kStatesAt);
        if constexpr (Arch::kAsyncCopy) copy_async_commit();
    }

    // Adds what the state holds for the warp's queries, once it has arrived. Scores and updates may still be on their way.
    FA_DEVICE void ask_state(Out& out, int64_t slot) const {
        float factors[2];
        read_factors(factors, slot);
        if constexpr (Arch::kAsyncCopy) copy_async_wait<1>();
        cta_barrier();
        typename Arch::template Rows<1, kHeaddim> queries;
        queries.load(at_ + query_ * QueryCopy::kPitch);
        Arch::multiply_rows_as_values(out, queries, at_ + kStatesAt + out_column_ * StateCopy::kPitch);
        if constexpr (kGatePerKey) return;
#pragma unroll
        for (int n = 0; n < kWarpOutColumns / 8; ++n)
#pragma unroll
            for (int i = 0; i < Arch::kElements; ++i) out[0][n][i] *= factors[Arch::row_of_element(i)];
    }

    // Values, or in scratch updates of the delta rule.
    FA_DEVICE void copy_values(int64_t slot) const {
        if constexpr (kDeltaRule && !kReversed) {
            copy_updates<WholeCta, kColumns>(p_.updates + updates_at(p_, slot, column_), p_.columns_v - column_,
                                             at_ + kUpdatesAt);
        } else {
            const int64_t offset = sequence_.offset(p_.v_stride_batch, p_.v_stride_row, p_.v_stride_head, head_);
            copy_tile(UpdateCopy({p_.v + offset + column_, p_.v_stride_row, sequence_.length, p_.columns_v - column_}),
                      chunk_ * kChunk, at_ + kUpdatesAt);
        }
    }

    // Reads the factors of the lane's queries.
    FA_DEVICE void read_factors(float (&factors)[2], int64_t slot) const {
        if constexpr (kGatePerKey) return;
        constexpr FactorPlane kPlane = kReversed ? kKeysToState : kQueriesOfState;
#pragma unroll
        for (int which = 0; which < 2; ++which)
            factors[which] = p_.factors[slot * kFactors + kPlane * kChunk + query_ + Arch::row(which)];
    }

    // Writes the warp's results from shared memory to out.
    FA_DEVICE void write_out(uint32_t from) const {
        constexpr int kPieces = kWarpOutColumns / 8, kAll = Arch::kStepRows * kPieces;
        const int first = chunk_ * kChunk + query_, first_column = column_ + out_column_;
        const int64_t stride = static_cast<int64_t>(p_.nheads) * p_.columns_v;
        const int64_t row = static_cast<int64_t>(sequence_.batch) * p_.seqlen + sequence_.first + first;
        uint16_t* const to = p_.out + row * stride + head_ * p_.columns_v + first_column;
#pragma unroll
        for (int i = 0; i < kAll; i += 32) {
            const int piece = (i + lane_index()) % kAll, row = piece / kPieces, column = piece % kPieces * 8;
            if (first + row < sequence_.length && first_column + column < p_.columns_v)
                store_global_128(to + row * stride + column, load_shared_128(from + row * kOutPitch + column * 2));
        }
    }

    const ChunkParams& p_;
    const Sequence sequence_;
    const int chunk_, head_, column_;
    const int query_, out_column_;  // the warp's first query and column within the CTA
    const uint32_t at_ = shared_memory();
};

}  // namespace fastattention

extern "C" FA_KERNEL void FA_LAUNCH_BOUNDS(fastattention::kThreads, fastattention::Config::min_ctas)
    fastattention_linear_outputs(FA_PARAMETER fastattention::ChunkParams params) {
    using namespace fastattention;
    wait_for_previous_kernel();
    // CTAs of one chunk are neighbours: they read the same queries and scores.
    const int parts = num_column_parts(params);
    const int part = static_cast<int>(cta_index() % parts), index = static_cast<int>(cta_index() / parts);
    const int slot = index / params.nheads, head = index % params.nheads;
    const Sequence sequence = sequence_of_slot(params, slot);
    const int chunk = slot - sequence.first_slot;
    if (chunk >= sequence.num_chunks()) return;
    Outputs(params, sequence, chunk, head, part * kColumns).run();
}
