// Gradients of queries, keys, gates and betas with one gate per head, for all chunks at once. With the products of
// token_products.cuh, normalized queries q and keys k, and products of gates a(i, j):
//
//     A_ij = scale a(i, j) (dO u^T)_ij, beta_j times that without the delta rule;  B_ij = -beta_i a(i, j) (x u^T)_ij, j < i
//     dq_i = scale a(i, -1) (dO S^T)_i + sum of A_ij k_j
//     dk_i = -beta_i a(i, -1) (x S^T)_i + a(last, i) (u G^T)_i + sum of B_ij k_j + A_ji q_j + B_ji k_j
//
// A gate is a factor of every path from a token, or the state, to a later token, or the next state. The gradient of its
// logarithm is the sum over these paths of products of weight and gradient, which A and B give (decision 0082).
#pragma once

#include "gate_products.cuh"
#include "token_products.cuh"

namespace fastattention {

static_assert(!kGatePerKey, "key_gradients.cuh serves them");

// Planes of TokenPlanes. Of sums, warps leave parts in several planes.
enum TokenPlane {
    kBetaPlane,
    kKeyLength,  // inverses, as kQueryLength
    kQueryLength,
    kValuePlane,  // x . v
    kRawOwn,      // dO . u
    kOwn,         // the weight of a token in its own output, times its gradient
    kLeaving,     // paths from the token to later ones
    kArriving = kLeaving + kRowSteps,                                 // paths to its query
    kAskedPlane = kArriving + kScoreParts + kColumnParts,             // to its key as it asks the state, before beta
    kEnding = kAskedPlane + kDeltaRule * (kScoreParts + kColumnParts),  // to the next state
    kAlongQuery = kEnding + kColumnParts,                             // gradient and query, multiplied
    kAlongKey = kAlongQuery + kColumnParts,
    kTokenPlanes = kAlongKey + kColumnParts,
};

class TokenGradients : TokenProducts {
public:
    FA_DEVICE TokenGradients(const GradientParams& p, const Sequence& sequence, int chunk, int head)
        : TokenProducts(p, sequence, chunk, head) {}

    FA_DEVICE void run() {
        const TokenScalars scalars(call_, sequence_, chunk_, head_);
        if constexpr (kRowsEarly) copy_rows();
        leave_scalars(scalars);
        cta_barrier();
        gates_.multiply_within_parts();
        cta_barrier();
        gates_.multiply_parts();
        find_products(planes_.at(kBetaPlane, 0), planes_.at(kValuePlane, 0));
        if constexpr (!kRowsEarly) {
            copy_rows();
            if constexpr (Arch::kAsyncCopy) copy_async_wait<0>();
            cta_barrier();
        }
        if (call_.normalizes) {
            find_lengths<2 * kChunk>(rows_at(kKeys), planes_.at(kKeyLength, 0));
            cta_barrier();
        }
        add_states();
        find_scores();
        cta_barrier();
        add_scores();
        write_rows();
        write_scalars();
    }

private:
    enum Kind { kKeys, kQueries };  // tiles of rows, in their order

    using RowCopy = TileCopy<Arch, WholeCta, uint16_t, false, kChunk, kHeaddim>;
    static constexpr bool kRowsEarly = Config::rows_early;  // keys and queries have memory of their own
    static constexpr int kRowsBehind = kRowsEarly ? 0 : 2 * RowCopy::kBytes;
    // Squares, and rows that are not early, take the place of slices.
    static constexpr int kSlices = kStages * kSliceBytes, kLater = kSquares * kSquareBytes + kRowsBehind;
    static constexpr int kGatesAt = kSlices > kLater ? kSlices : kLater, kSumsAt = kGatesAt + GateProducts::kBytes,
                         kPathsAt = kSumsAt + kTokenPlanes * kChunk * 4, kEndAt = kPathsAt + (kWarps * 4 + 15) / 16 * 16;
    static constexpr int kRowsAt = kRowsEarly ? kEndAt : kSquares * kSquareBytes;
    static_assert(kEndAt + (kRowsEarly ? 2 * RowCopy::kBytes : 0) == Config::shared_bytes);

    FA_DEVICE uint32_t rows_at(Kind kind) const { return at_ + kRowsAt + kind * RowCopy::kBytes; }
    FA_DEVICE void copy_rows() const {
        const int key_head = head_ / call_.group_size;
        const auto copy = [&](const uint16_t* base, int64_t stride_batch, int stride_row, int64_t stride_head, Kind kind) {
            RowCopy rows({base + sequence_.offset(stride_batch, stride_row, stride_head, key_head), stride_row,
                          sequence_.length, call_.columns_k});
            if constexpr (Arch::kAsyncCopy) {
                rows.begin(chunk_ * kChunk, rows_at(kind));
            } else {
                rows.copy(chunk_ * kChunk, rows_at(kind));
            }
        };
        copy(call_.k, call_.k_stride_batch, call_.k_stride_row, call_.k_stride_head, kKeys);
        copy(call_.q, call_.q_stride_batch, call_.q_stride_row, call_.q_stride_head, kQueries);
        if constexpr (Arch::kAsyncCopy) copy_async_commit();
    }

    FA_DEVICE void leave_scalars(const TokenScalars& scalars) const {
        const int token = thread_index();
        if (token >= kChunk) return;
        store_number(gates_.gate(token), scalars.gate());
        planes_.store(kBetaPlane, token, scalars.beta());
        planes_.store(kKeyLength, token, 1.0f);
        planes_.store(kQueryLength, token, 1.0f);
    }

    FA_DEVICE float since(int token) const { return load_number(gates_.product(token, kChunk)); }
    FA_DEVICE float after(int token) const { return load_number(gates_.product(kChunk - 1, token)); }
    FA_DEVICE float length(Kind kind, int token) const { return planes_.load(kKeyLength + kind, token); }
    FA_DEVICE float beta(int token) const { return planes_.load(kBetaPlane, token); }
    // What multiplies an update of a token that is not of the delta rule.
    FA_DEVICE float source(int token) const { return kDeltaRule ? 1.0f : beta(token); }

    FA_DEVICE void find_scores() {
        if (!has_scores()) return;
        float leaving[kScoreColumns / 8][kElements / 2] = {};
        leave_scores<false>(of_queries_, leaving);
        if constexpr (kDeltaRule) leave_scores<true>(of_asking_, leaving);
#pragma unroll
        for (int n = 0; n < kScoreColumns / 8; ++n)
#pragma unroll
            for (int i = 0; i < kElements; ++i) {
                if (Arch::row_of_element(i) != 0) continue;
                const float sum = Arch::reduce_column(leaving[n][Arch::column_of_element(i)], add);
                if (Arch::row(0) == 0)
                    planes_.store(kLeaving + row_ / Arch::kStepRows, first_score() + Arch::score_column(n, i), sum);
            }
    }

    static FA_DEVICE float add(float a, float b) { return a + b; }

    // Turns products into A or B, leaves them as operands, and sums paths.
    template <bool kAsks>
    FA_DEVICE void leave_scores(Scores& products, float (&leaving)[kScoreColumns / 8][kElements / 2]) const {
        constexpr Kind kKind = kAsks ? kKeys : kQueries;
        Scores weights = {};
        typename Arch::template Rows<1, kHeaddim> rows;
        rows.load(rows_at(kKind) + row_ * RowCopy::kPitch);
        Arch::multiply_rows(weights, rows, rows_at(kKeys) + first_score() * RowCopy::kPitch);
        int row[2];
        float of_row[2], factor[2], arriving[2] = {};
#pragma unroll
        for (int which = 0; which < 2; ++which) {
            row[which] = row_ + Arch::row(which);
            of_row[which] = length(kKind, row[which]);
            factor[which] = kAsks ? -beta(row[which]) : 1.0f;
        }
#pragma unroll
        for (int n = 0; n < kScoreColumns / 8; ++n)
#pragma unroll
            for (int i = 0; i < kElements; i += 2) {
                const int column = first_score() + Arch::score_column(n, i), which = Arch::row_of_element(i);
                float to_rows[2], to_keys[2];
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const int key = column + j;
                    const bool valid = key < row[which] + !kAsks, is_own = key == row[which];
                    const float x = valid ? products[0][n][i + j] : 0.0f, of_key = length(kKeys, key);
                    const float gradient = load_number(gates_.product(row[which], key)) * (kAsks ? x : call_.scale * x);
                    const float path = gradient * of_row[which] * of_key * weights[0][n][i + j];
                    const float operand = gradient * (kAsks ? factor[which] : source(key));
                    to_rows[j] = operand * of_key;
                    to_keys[j] = operand * of_row[which];
                    arriving[which] += is_own ? 0.0f : path * (kAsks ? 1.0f : source(key));
                    leaving[n][Arch::column_of_element(i) + j] += is_own ? 0.0f : path * factor[which];
                    if (!kAsks && is_own) {
                        planes_.store(kOwn, key, path);
                        planes_.store(kRawOwn, key, x);
                    }
                }
                store_shared_32(square(kAsks, false) + row[which] * kTrianglePitch + column * 2,
                                Operand::pack(to_rows[0], to_rows[1]));
                leave_transposed(square(kAsks, true), row[which], column, to_keys);
            }
        leave_sums((kAsks ? kAskedPlane : kArriving) + part_, arriving);
    }

    // Multiplies products with states by gates, and sums paths from the state and to the next one.
    FA_DEVICE void add_states() {
        scale_rows(queries_, kQueries, kArriving + kScoreParts, [&](int i) { return call_.scale * since(i); });
        scale_rows(keys_, kKeys, kEnding, [&](int i) { return after(i); });
        if constexpr (kDeltaRule) {
            scale_rows(asking_, kKeys, kAskedPlane + kScoreParts, [&](int i) { return since(i); });
#pragma unroll
            for (int n = 0; n < kPartColumns / 8; ++n)
#pragma unroll
                for (int i = 0; i < kElements; ++i)
                    keys_[0][n][i] -= beta(row_ + Arch::row(Arch::row_of_element(i))) * asking_[0][n][i];
        } else {
            visit_rows(keys_, [&](int row, int, float* pair) {
                pair[0] *= beta(row);
                pair[1] *= beta(row);
            });
        }
        const float paths = sum_of_lanes(state_paths_[0]);
        const int warp = warp_index();
        if (lane_index() == 0) store_number(at_ + kPathsAt + warp * 4, paths);
    }

    // Multiplies rows by factors, and leaves their products with normalized queries or keys.
    template <class Factor>
    FA_DEVICE void scale_rows(Rows& x, Kind kind, int plane, Factor factor) {
        float along[2] = {};
#pragma unroll
        for (int n = 0; n < kPartColumns / 8; ++n)
#pragma unroll
            for (int i = 0; i < kElements; i += 2) {
                const int which = Arch::row_of_element(i), row = row_ + Arch::row(which);
                const float by = factor(row);
                float* const pair = &x[0][n][i];
                pair[0] *= by;
                pair[1] *= by;
                along[which] += product_with_row(pair, kind, row, first_column() + Arch::value_column(n, i));
            }
#pragma unroll
        for (int which = 0; which < 2; ++which) along[which] *= length(kind, row_ + Arch::row(which));
        leave_sums(plane + part_, along);
    }

    // Adds up what lanes have of the same two rows.
    FA_DEVICE void leave_sums(int plane, const float (&of_rows)[2]) const {
#pragma unroll
        for (int which = 0; which < 2; ++which) {
            const float sum = Arch::reduce_row(of_rows[which], add);
            if (Arch::score_column(0, 0) == 0) planes_.store(plane, row_ + Arch::row(which), sum);
        }
    }

    FA_DEVICE float product_with_row(const float* pair, Kind kind, int row, int column) const {
        const uint32_t given = load_shared_32(rows_at(kind) + row * RowCopy::kPitch + column * 2);
        return pair[0] * Operand::widen(static_cast<uint16_t>(given)) +
               pair[1] * Operand::widen(static_cast<uint16_t>(given >> 16));
    }

    // Adds what other tokens of the chunk give.
    FA_DEVICE void add_scores() {
        add_products(queries_, square(false, false), kKeys);
        add_products(keys_, square(false, true), kQueries);
        if constexpr (kDeltaRule) {
            add_products(keys_, square(true, false), kKeys);
            add_products(keys_, square(true, true), kKeys);
        }
    }

    FA_DEVICE void add_products(Rows& to, uint32_t scores, Kind kind) const {
        typename Arch::template Rows<1, kChunk> rows;
        rows.load(scores + row_ * kTrianglePitch);
        const typename Arch::template Values<kHeaddim> values(rows_at(kind) + first_column() * 2);
#pragma unroll
        for (int group = 0; group < kChunk / Arch::kKeyStep; ++group) values.accumulate(to, rows, group);
    }

    // Writes gradients of queries and keys; of rows that were normalized, only what is across them.
    FA_DEVICE void write_rows() {
        if (call_.normalizes) {
            scale_rows(queries_, kQueries, kAlongQuery, [](int) { return 1.0f; });
            scale_rows(keys_, kKeys, kAlongKey, [](int) { return 1.0f; });
            cta_barrier();
            normalize(queries_, kQueries, kAlongQuery);
            normalize(keys_, kKeys, kAlongKey);
        }
        write(queries_, p_.dq);
        write(keys_, p_.dk);
        if (!call_.normalizes) cta_barrier();  // all sums have arrived
    }

    FA_DEVICE void normalize(Rows& x, Kind kind, int plane) {
        visit_rows(x, [&](int row, int column, float* pair) {
            const float inverse = length(kind, row), along = planes_.sum(plane, kColumnParts, row) * inverse;
            const float factor = inverse == 0.0f ? reciprocal_root(kLengthEpsilon) : inverse;
            const uint32_t given = load_shared_32(rows_at(kind) + row * RowCopy::kPitch + column * 2);
            pair[0] = factor * (pair[0] - along * Operand::widen(static_cast<uint16_t>(given)));
            pair[1] = factor * (pair[1] - along * Operand::widen(static_cast<uint16_t>(given >> 16)));
        });
    }

    FA_DEVICE void write(Rows& x, void* to) const {
        visit_rows(x, [&](int row, int column, const float* pair) {
            if (row >= num_tokens() || column >= call_.columns_k) return;
            const int64_t at = ((first_token() + row) * call_.nheads + head_) * call_.columns_k + column;
            if (p_.sums_heads) {
                store_global_64(static_cast<float*>(to) + at, {as_bits(pair[0]), as_bits(pair[1])});
            } else {
                *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(to) + at) = Operand::pack(pair[0], pair[1]);
            }
        });
    }

    // Writes gradients of gates, betas and `skip`. Sums of a token's gradients are first left in place of their parts.
    FA_DEVICE void write_scalars() const {
        const int token = thread_index();
        float beta_gradient = 0.0f;
        if (token < kChunk) {
            const float leaving = planes_.sum(kLeaving, kRowSteps, token);
            const float ending = planes_.sum(kEnding, kColumnParts, token);
            float arriving = planes_.sum(kArriving, kScoreParts + kColumnParts, token);
            if constexpr (kDeltaRule) {
                const float asked = planes_.sum(kAskedPlane, kScoreParts + kColumnParts, token);
                arriving -= beta(token) * asked;
                beta_gradient = planes_.load(kValuePlane, token) - asked;
            } else {
                beta_gradient = planes_.load(kOwn, token) + leaving + ending;
            }
            planes_.store(kArriving, token, arriving - source(token) * leaving);
            planes_.store(kEnding, token, source(token) * ending);
        }
        cta_barrier();
        if (token >= kChunk) return;
        if (call_.skip != nullptr && token == 0) write_skip();
        if (token >= num_tokens()) return;
        const int64_t at = (first_token() + token) * call_.nheads + head_;
        p_.dg[at] = gate_gradient(token);
        if (call_.beta != nullptr) p_.dbeta[at] = beta_gradient;
    }

    // Paths over the gate: to this token and later ones, but for those that leave from there, and to the next state.
    FA_DEVICE float gate_gradient(int token) const {
        float later = 0.0f, earlier = 0.0f;
        for (int i = kChunk - 1; i >= token; --i) later += planes_.load(kArriving, i);
        for (int warp = 0; warp < kWarps; ++warp) earlier += load_number(at_ + kPathsAt + warp * 4);
        earlier *= since(kChunk - 1);
        for (int j = 0; j < token; ++j) earlier += planes_.load(kEnding, j);
        return later + earlier;
    }

    FA_DEVICE void write_skip() const {
        float sum = 0.0f;
        for (int i = 0; i < kChunk; ++i) sum += planes_.load(kRawOwn, i);
        p_.dskip[slot_] = sum;
    }

    const GateProducts gates_{at_ + kGatesAt};
    const TokenPlanes planes_{at_ + kSumsAt};
};

}  // namespace fastattention

extern "C" FA_KERNEL void FA_LAUNCH_BOUNDS(fastattention::kThreads, fastattention::Config::min_ctas)
    fastattention_linear_token_gradients(FA_PARAMETER fastattention::GradientParams params) {
    fastattention::run_token_gradients<fastattention::TokenGradients>(params);
}
