// The products that gradients of a chunk's queries, keys and gates begin with, for all chunks at once: those over columns
// of v. With gradients dO of outputs, x of updates before beta, and G of the state after the chunk, and with updates u and
// the state S before the chunk:
//
//     of queries   dO S^T    and for each earlier token, and itself,   dO u^T
//     of asking    x S^T     and for each earlier token                x u^T     with the delta rule
//     of keys      u G^T
//
// Products of gates are not in them. With these, and weights, sums for queries and keys are called A, for asking keys B.
//
// A CTA has a chunk of a head. Its warps divide tokens, and key dimensions of products
// with states, or tokens of products with updates.
#pragma once

#include "chunk_tiles.cuh"
#include "token_scalars.cuh"

namespace fastattention {

constexpr int kRowSteps = kChunk / Arch::kStepRows, kColumnParts = kWarps / kRowSteps;
constexpr int kPartColumns = kHeaddim / kColumnParts;  // key dimensions of a warp
constexpr int kMostScoreParts = kChunk / 8, kScoreParts = kColumnParts < kMostScoreParts ? kColumnParts : kMostScoreParts;
constexpr int kScoreColumns = kChunk / kScoreParts;  // earlier tokens of a warp; some warps may have none
constexpr int kSlice = kColumns;                     // columns of v at a time
static_assert(kPartColumns % 16 == 0 && kScoreColumns % 8 == 0, "warps have whole accumulators");

constexpr int kSquares = 2 * (1 + kDeltaRule);  // A and B, each as it is and transposed
constexpr int kSquareBytes = kChunk * kTrianglePitch;

// Numbers of which a chunk has one for each token, in planes.
class TokenPlanes {
public:
    explicit FA_DEVICE TokenPlanes(uint32_t at) : at_(at) {}

    FA_DEVICE uint32_t at(int plane, int token) const { return at_ + (plane * kChunk + token) * 4; }
    FA_DEVICE float load(int plane, int token) const { return load_number(at(plane, token)); }
    FA_DEVICE void store(int plane, int token, float x) const { store_number(at(plane, token), x); }

    // Adds up `count` planes.
    FA_DEVICE float sum(int plane, int count, int token) const {
        float sum = 0.0f;
        for (int i = 0; i < count; ++i) sum += load(plane + i, token);
        return sum;
    }

private:
    uint32_t at_;
};

class TokenProducts {
protected:
    static constexpr int kElements = Arch::kElements;
    using Rows = float[1][kPartColumns / 8][kElements];     // with the column layout of Values
    using Scores = float[1][kScoreColumns / 8][kElements];  // with that of multiply_rows
    using SliceRows = typename Arch::template Rows<1, kSlice>;

    using TokenCopy = TileCopy<Arch, WholeCta, uint16_t, false, kChunk, kSlice>;
    using StateCopy = TileCopy<Arch, WholeCta, uint16_t, false, kSlice, kHeaddim>;

    // Tiles of a slice in shared memory.
    static constexpr int kUpdatesAt = TokenCopy::kBytes, kAskingAt = 2 * TokenCopy::kBytes,
                         kStatesAt = (2 + kDeltaRule) * TokenCopy::kBytes, kGradientsAt = kStatesAt + StateCopy::kBytes;
    static constexpr int kSliceBytes = kGradientsAt + StateCopy::kBytes;

    // Sums of products of elements of S and G. A thread has eight key dimensions, which are added up with gates of heads.
    static constexpr int kPathSums = kGatePerKey ? 8 : 1, kPiecesOfState = kHeaddim / 8;
    static_assert(kThreads % kPiecesOfState == 0, "a thread has the same key dimensions in all rows");

    FA_DEVICE TokenProducts(const GradientParams& p, const Sequence& sequence, int chunk, int head)
        : p_(p),
          call_(p.call),
          sequence_(sequence),
          chunk_(chunk),
          head_(head),
          slot_(static_cast<int>(slot_of(p.call, sequence, head)) + chunk),
          row_(warp_index() / kColumnParts * Arch::kStepRows),
          part_(warp_index() % kColumnParts) {}

    FA_DEVICE bool has_scores() const { return kScoreParts == kColumnParts || part_ < kScoreParts; }
    FA_DEVICE int first_column() const { return part_ * kPartColumns; }
    FA_DEVICE int first_score() const { return part_ * kScoreColumns; }
    FA_DEVICE int num_tokens() const { return sequence_.length - chunk_ * kChunk; }  // to the end of the sequence
    // The index of the chunk's first token in tensors of tokens that are contiguous.
    FA_DEVICE int64_t first_token() const {
        return static_cast<int64_t>(sequence_.batch) * call_.seqlen + sequence_.first + chunk_ * kChunk;
    }

    // Computes all products, and gradients of values and a share of those of betas of delta rules. betas, value_sums:
    // addresses of a float for each token. After the last barrier no thread reads tiles any more.
    FA_DEVICE void find_products(uint32_t betas, uint32_t value_sums) {
        constexpr bool kAhead = Arch::kAsyncCopy && kStages > 1;
        if constexpr (kAhead) begin(0, 0);
        int stage = 0;
        for (int column = 0; column < call_.columns_v; column += kSlice) {
            if constexpr (!kAhead) begin(column, 0);
            if constexpr (Arch::kAsyncCopy) copy_async_wait<0>();
            cta_barrier();
            if constexpr (kAhead)
                if (column + kSlice < call_.columns_v) begin(column + kSlice, stage ^ 1);
            multiply(slice(stage));
            if constexpr (kDeltaRule) write_values(slice(stage), column, betas, value_sums);
            if constexpr (kAhead) {
                stage ^= 1;
            } else {
                cta_barrier();
            }
        }
        if constexpr (kAhead) cta_barrier();
    }

    // Where A or, with the delta rule, B and their transposes are, as operands.
    FA_DEVICE uint32_t square(bool asks, bool transposed) const { return at_ + (2 * asks + transposed) * kSquareBytes; }

    // Stores two neighbours of a row, transposed. The lane with the row beside it has the same columns: each stores one.
    static FA_DEVICE void leave_transposed(uint32_t to, int row, int column, const float (&pair)[2]) {
        const int odd = row % 2;
        const float other = shuffle_xor(odd ? pair[0] : pair[1], Arch::kNextRowLane);
        store_shared_32(to + (column + odd) * kTrianglePitch + (row - odd) * 2,
                        odd ? Operand::pack(other, pair[1]) : Operand::pack(pair[0], other));
    }

    // Calls visit(row, column, pair) with two neighbouring elements of a warp's products with states.
    template <class Visit>
    FA_DEVICE void visit_rows(Rows& x, Visit visit) const {
#pragma unroll
        for (int n = 0; n < kPartColumns / 8; ++n)
#pragma unroll
            for (int i = 0; i < kElements; i += 2)
                visit(row_ + Arch::row(Arch::row_of_element(i)), first_column() + Arch::value_column(n, i), &x[0][n][i]);
    }

    const GradientParams& p_;
    const ChunkParams& call_;
    const Sequence sequence_;
    const int chunk_, head_;
    const int slot_;  // index among the slots of all heads
    const int row_, part_;  // the warp's first token, and its part of columns
    const uint32_t at_ = shared_memory();
    Rows queries_ = {}, asking_ = {}, keys_ = {};
    Scores of_queries_ = {}, of_asking_ = {};
    float state_paths_[kPathSums] = {};

private:
    FA_DEVICE uint32_t slice(int stage) const { return at_ + stage * kSliceBytes; }

    FA_DEVICE void begin(int column, int stage) const {
        // Addresses are computed anew for each slice: products leave few registers to keep them.
        const int64_t slot = opaque(slot_), rows = slot * call_.columns_v + column, updates = updates_at(call_, slot, column);
        const int head = opaque(head_);
        const int left = call_.columns_v - column, stride_out = call_.nheads * call_.columns_v;
        const uint32_t to = slice(stage);
        const uint16_t* const dout =
            call_.dout + (first_token() - chunk_ * kChunk) * stride_out + head * call_.columns_v + column;
        copy(TokenCopy({dout, stride_out, sequence_.length, left}), chunk_ * kChunk, to);
        if constexpr (kDeltaRule) {
            copy_updates<WholeCta, kSlice>(call_.updates + updates, left, to + kUpdatesAt);
            copy_updates<WholeCta, kSlice>(p_.update_gradients + updates, left, to + kAskingAt);
        } else {
            copy(TokenCopy({values(head) + column, call_.v_stride_row, sequence_.length, left}), chunk_ * kChunk,
                 to + kUpdatesAt);
        }
        copy(StateCopy({call_.states + rows * kHeaddim, kHeaddim, left, kHeaddim}), 0, to + kStatesAt);
        copy(StateCopy({p_.state_gradients + rows * kHeaddim, kHeaddim, left, kHeaddim}), 0, to + kGradientsAt);
        if constexpr (Arch::kAsyncCopy) copy_async_commit();
    }

    // The head's values, of the sequence's first token on.
    FA_DEVICE const uint16_t* values(int head) const {
        return call_.v + sequence_.offset(call_.v_stride_batch, call_.v_stride_row, call_.v_stride_head, head);
    }

    template <class Copy>
    static FA_DEVICE void copy(Copy tile, int first_row, uint32_t to) {
        if constexpr (Arch::kAsyncCopy) {
            tile.begin(first_row, to);
        } else {
            tile.copy(first_row, to);
        }
    }

    FA_DEVICE void multiply(uint32_t tiles) {
        constexpr int kPitch = TokenCopy::kPitch;
        const uint32_t states = tiles + kStatesAt, updates = tiles + kUpdatesAt + first_score() * kPitch;
        SliceRows rows;
        rows.load(tiles + row_ * kPitch);
        if (has_scores()) Arch::multiply_rows(of_queries_, rows, updates);
        add_products(queries_, rows, states);
        if constexpr (kDeltaRule) {
            rows.load(tiles + kAskingAt + row_ * kPitch);
            if (has_scores()) Arch::multiply_rows(of_asking_, rows, updates);
            add_products(asking_, rows, states);
        }
        rows.load(tiles + kUpdatesAt + row_ * kPitch);
        add_products(keys_, rows, tiles + kGradientsAt);
        add_paths(states, tiles + kGradientsAt);
    }

    FA_DEVICE void add_products(Rows& to, const SliceRows& rows, uint32_t states) const {
        const typename Arch::template Values<kHeaddim> values(states + first_column() * 2);
#pragma unroll
        for (int group = 0; group < kSlice / Arch::kKeyStep; ++group) values.accumulate(to, rows, group);
    }

    FA_DEVICE void add_paths(uint32_t states, uint32_t gradients) {
        for (int piece = thread_index(); piece < kSlice * kPiecesOfState; piece += kThreads) {
            const uint32_t at = piece / kPiecesOfState * StateCopy::kPitch + piece % kPiecesOfState * 16;
            const Words4 state = load_shared_128(states + at), gradient = load_shared_128(gradients + at);
#pragma unroll
            for (int i = 0; i < 8; ++i) state_paths_[kGatePerKey ? i : 0] += operand(state, i) * operand(gradient, i);
        }
    }

    static FA_DEVICE float operand(const Words4& words, int i) {
        return Operand::widen(static_cast<uint16_t>(words.word[i / 2] >> i % 2 * 16));
    }

    // Writes gradients of values of the slice, beta x, and adds to x . v of each token.
    FA_DEVICE void write_values(uint32_t tiles, int column, uint32_t betas, uint32_t value_sums) const {
        constexpr int kPieces = kSlice / 8;
        static_assert(kChunk * kPieces % 32 == 0 && 32 % kPieces == 0, "lanes of a row add up");
        for (int piece = thread_index(); piece < kChunk * kPieces; piece += kThreads) {
            const int token = piece / kPieces, at = piece % kPieces * 8;
            float sum = 0.0f;
            if (token < num_tokens() && column + at < call_.columns_v) {
                const Words4 x = load_shared_128(tiles + kAskingAt + token * TokenCopy::kPitch + at * 2);
                const int64_t row = chunk_ * kChunk + token;
                const Words4 v = load_global_128(values(opaque(head_)) + row * call_.v_stride_row + column + at);
                const float beta = load_number(betas + token * 4);
                Words4 gradients;
#pragma unroll
                for (int i = 0; i < 8; i += 2) {
                    const float first = operand(x, i), second = operand(x, i + 1);
                    sum += first * operand(v, i) + second * operand(v, i + 1);
                    gradients.word[i / 2] = Operand::pack(beta * first, beta * second);
                }
                store_global_128(p_.dv + ((first_token() + token) * call_.nheads + head_) * call_.columns_v + column + at,
                                 gradients);
            }
            sum = sum_of_lanes<kPieces>(sum);
            if (at == 0)
                store_number(value_sums + token * 4, (column == 0 ? 0.0f : load_number(value_sums + token * 4)) + sum);
        }
    }
};

// Runs gradients of one chunk, in the grid of kernels: heads of a slot are neighbours.
template <class Gradients>
FA_DEVICE void run_token_gradients(const GradientParams& p) {
    const int index = static_cast<int>(cta_index()), slot = index / p.call.nheads, head = index % p.call.nheads;
    const Sequence sequence = sequence_of_slot(p.call, slot);
    const int chunk = slot - sequence.first_slot;
    if (chunk < sequence.num_chunks()) Gradients(p, sequence, chunk, head).run();
}

}  // namespace fastattention
