// Gradients of queries, keys, gates and betas with a gate for every key dimension, for all chunks at once. They are those of
// token_gradients.cuh, with vectors of gates: a(i, j) multiplies elements of keys and queries.
//
// A chunk consists of parts of 16 tokens. Sums over tokens with the gates in between follow Horner's rule: a sum over
// earlier tokens is multiplied by a gate, then gets the next token's term. Between parts, matrix products are such terms,
// and the gates of whole parts are factors. Within a part, a lane has a key dimension, and goes from token to token. Where a
// warp's step has two parts, each has half of the lanes.
#pragma once

#include "fours.cuh"
#include "key_lanes.cuh"

namespace fastattention {

class KeyGradients : KeyLanes {
public:
    FA_DEVICE KeyGradients(const GradientParams& p, const Sequence& sequence, int chunk, int head)
        : KeyLanes(p, sequence, chunk, head, kPlanesAt) {}

    FA_DEVICE void run() {
        if (thread_index() < kChunk) {
            planes_.store(kBetaPlane, thread_index(), TokenScalars(call_, sequence_, chunk_, head_).beta());
            planes_.store(kKeyLength, thread_index(), 1.0f);
            planes_.store(kQueryLength, thread_index(), 1.0f);
        }
        cta_barrier();
        if (call_.normalizes) find_lengths();
        leave_tiles();
        find_products(planes_.at(kBetaPlane, 0), planes_.at(kValuePlane, 0));
        leave_paths();
        leave_scores();
        cta_barrier();
        add_up_paths();
        Rows later = {};
        join_parts(later);
        cta_barrier();  // all tiles and squares have been read
        find_gradients(later);
    }

private:
    // Rows of a warp, which lanes exchange: those of queries and then of keys, what the next state gives, and what keys give
    // as they ask.
    enum Buffer { kSums, kEnds, kAsked, kMostBuffers };
    static constexpr int kBuffers = kDeltaRule ? kMostBuffers : kAsked;
    using RowCopy = TileCopy<Arch, WholeCta, uint16_t, false, kChunk, kHeaddim>;

    // Squares and paths take the place of slices. Buffers take that of all these and tiles.
    static constexpr int kPathsAt = kSquares * kSquareBytes, kSquaresEnd = kPathsAt + kWarps * kHeaddim * 4;
    static constexpr int kSlices = kStages * kSliceBytes, kTilesAt = kSlices > kSquaresEnd ? kSlices : kSquaresEnd,
                         kTilesEnd = kTilesAt + (2 + kDeltaRule) * RowCopy::kBytes;
    static constexpr int kBufferPitch = (kPartColumns + 2) * 4, kBufferBytes = Arch::kStepRows * kBufferPitch,
                         kBuffersEnd = kBuffers * kWarps * kBufferBytes;
    static constexpr int kOwnAt = kTilesEnd > kBuffersEnd ? kTilesEnd : kBuffersEnd, kOwnBytes = kChunk * kPart * 4,
                         kPartGatesAt = kOwnAt + kSquares * kOwnBytes, kSumsAt = kPartGatesAt + kParts * kHeaddim * 4,
                         kPlanesAt = kSumsAt + 2 * kParts * kHeaddim * 4;
    static_assert(kPlanesAt + kTokenPlanes * kChunk * 4 == Config::shared_bytes);

    FA_DEVICE uint32_t tile(Kind kind) const { return at_ + kTilesAt + kind * RowCopy::kBytes; }
    // Scores of tokens of the same part, in floats.
    FA_DEVICE uint32_t own(bool asks, bool transposed, int row, int column) const {
        return at_ + kOwnAt + (2 * asks + transposed) * kOwnBytes + (row * kPart + column % kPart) * 4;
    }
    // The product of the gates of a part.
    FA_DEVICE uint32_t part_gates(int part, int key) const { return at_ + kPartGatesAt + (part * kHeaddim + key) * 4; }
    // Sums over the tokens of a part, of paths over gates, and of those to the next state.
    FA_DEVICE uint32_t part_sum(bool of_ends, int part, int key) const {
        return at_ + kSumsAt + ((of_ends * kParts + part) * kHeaddim + key) * 4;
    }
    FA_DEVICE uint32_t at(Buffer buffer, int row, int column) const {
        return buffers_ + buffer * kBufferBytes + row * kBufferPitch + column * 4;
    }
    // The lane's element of token i of its part.
    FA_DEVICE uint32_t element(Buffer buffer, int i) const {
        return at(buffer, first_ - row_ + i, lane_index() % kPartColumns);
    }

    // Leaves operands of products between parts: keys times the gates after them in their part, queries and asking keys
    // times the gates before them and their own.
    FA_DEVICE void leave_tiles() const {
        const Lane gates = read_gates();
        Lane keys = read_normalized(kKeys), rows = read_normalized(kQueries);
        multiply_since(rows, gates);
        leave_rows(kQueries, rows);
        if constexpr (kDeltaRule) {
            rows = keys;
            multiply_since(rows, gates);
            leave_rows(kAsking, rows);
        }
        float behind = 1.0f;
#pragma unroll
        for (int i = kPart - 1; i >= 0; --i) {
            keys.x[i] *= behind;
            behind *= gates.x[i];
        }
        leave_rows(kKeys, keys);
        store_number(part_gates(first_ / kPart, key_), behind);
    }

    static FA_DEVICE void multiply_since(Lane& rows, const Lane& gates) {
        float since = 1.0f;
#pragma unroll
        for (int i = 0; i < kPart; ++i) {
            since *= gates.x[i];
            rows.x[i] *= since;
        }
    }

    // Two lanes with neighbouring columns exchange, so that each stores both of one row.
    FA_DEVICE void leave_rows(Kind kind, const Lane& rows) const {
        const bool odd = key_ % 2;
#pragma unroll
        for (int i = 0; i < kPart; i += 2) {
            const float other = shuffle_xor(odd ? rows.x[i] : rows.x[i + 1], 1);
            store_shared_32(tile(kind) + (first_ + i + odd) * RowCopy::kPitch + (key_ - odd) * 2,
                            odd ? Operand::pack(other, rows.x[i + 1]) : Operand::pack(rows.x[i], other));
        }
    }

    // Leaves each warp's sums of products of elements of S and G.
    FA_DEVICE void leave_paths() {
#pragma unroll
        for (int i = 0; i < kPathSums; ++i)
#pragma unroll
            for (int distance = kPiecesOfState; distance < 32; distance *= 2)
                state_paths_[i] += shuffle_xor(state_paths_[i], distance);
        const uint32_t to = at_ + kPathsAt + (warp_index() * kHeaddim + thread_index() % kPiecesOfState * 8) * 4;
        if (lane_index() >= kPiecesOfState) return;
#pragma unroll
        for (int i = 0; i < kPathSums; ++i) store_number(to + i * 4, state_paths_[i]);
    }

    FA_DEVICE void add_up_paths() {
        paths_ = 0.0f;
        for (int warp = 0; warp < kWarps; ++warp) paths_ += load_number(at_ + kPathsAt + (warp * kHeaddim + key_) * 4);
    }

    FA_DEVICE void leave_scores() const {
        if (!has_scores()) return;
        leave_scores<false>(of_queries_);
        if constexpr (kDeltaRule) leave_scores<true>(of_asking_);
    }

    // Leaves A or B without products of gates, each as it is and transposed. Scores of tokens of the same part stay floats.
    template <bool kAsks>
    FA_DEVICE void leave_scores(const Scores& products) const {
#pragma unroll
        for (int n = 0; n < kScoreColumns / 8; ++n)
#pragma unroll
            for (int i = 0; i < kElements; i += 2) {
                const int row = row_ + Arch::row(Arch::row_of_element(i)), column = first_score() + Arch::score_column(n, i);
                const float of_keys = kAsks ? -planes_.load(kBetaPlane, row) : 1.0f;
                const bool is_own = row / kPart == column / kPart;
                float between[2], turned[2];
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const float given = kAsks ? products[0][n][i + j] : call_.scale * products[0][n][i + j];
                    if (is_own) {
                        store_number(own(kAsks, false, row, column + j), given);
                        store_number(own(kAsks, true, column + j, row), given * of_keys);
                    }
                    between[j] = is_own || column > row ? 0.0f : given;
                    turned[j] = between[j] * of_keys;
                }
                store_shared_32(square(kAsks, false) + row * kTrianglePitch + column * 2,
                                Operand::pack(between[0], between[1]));
                leave_transposed(square(kAsks, true), row, column, turned);
            }
    }

    // Adds what other parts give: to rows those before, to keys (later) those after.
    FA_DEVICE void join_parts(Rows& later) {
        visit_rows(queries_, [&](int, int, float* pair) {
            pair[0] *= call_.scale;
            pair[1] *= call_.scale;
        });
        for (int other = 0; other + 1 < kParts; ++other) {
            if (row_ + Arch::kStepRows <= (other + 1) * kPart) break;
            add_part(queries_, false, false, kKeys, other);
            if constexpr (kDeltaRule) add_part(asking_, true, false, kKeys, other);
        }
        for (int other = kParts - 1; other > row_ / kPart; --other) {
            add_part(later, false, true, kQueries, other);
            if constexpr (kDeltaRule) add_products(later, square(true, true), tile(kAsking), other);
        }
    }

    // Multiplies rows by the gates of another part, then adds its products.
    FA_DEVICE void add_part(Rows& to, bool asks, bool transposed, Kind kind, int other) const {
#pragma unroll
        for (int n = 0; n < kPartColumns / 8; ++n)
#pragma unroll
            for (int i = 0; i < kElements; i += 2) {
                const int part = (row_ + Arch::row(Arch::row_of_element(i))) / kPart;
                if (transposed ? part >= other : part <= other) continue;
                const Words2 gates = load_shared_64(part_gates(other, first_column() + Arch::value_column(n, i)));
                to[0][n][i] *= as_float(gates.word[0]);
                to[0][n][i + 1] *= as_float(gates.word[1]);
            }
        add_products(to, square(asks, transposed), tile(kind), other);
    }

    FA_DEVICE void add_products(Rows& to, uint32_t scores, uint32_t rows, int part) const {
        typename Arch::template Rows<1, kChunk> left;
        left.load(scores + row_ * kTrianglePitch);
        const typename Arch::template Values<kHeaddim> values(rows + first_column() * 2);
        constexpr int kGroups = kPart / Arch::kKeyStep;
#pragma unroll
        for (int group = 0; group < kGroups; ++group) values.accumulate(to, left, part * kGroups + group);
    }

    FA_DEVICE void leave(const Rows& x, Buffer buffer) const {
#pragma unroll
        for (int n = 0; n < kPartColumns / 8; ++n)
#pragma unroll
            for (int i = 0; i < kElements; i += 2)
                store_shared_64(at(buffer, Arch::row(Arch::row_of_element(i)), Arch::value_column(n, i)),
                                {as_bits(x[0][n][i]), as_bits(x[0][n][i + 1])});
    }

    // Adds what tokens of the same part give, in the lane's key dimension, and writes all gradients.
    FA_DEVICE void find_gradients(const Rows& later) {
        leave(queries_, kSums);
        leave(keys_, kEnds);
        if constexpr (kDeltaRule) leave(asking_, kAsked);
        warp_barrier();
        Lane paths;
        find_rows(paths);
        cta_barrier();
        write(kQueries, p_.dq);
        warp_barrier();
        leave(later, kSums);
        warp_barrier();
        find_keys(paths);
        cta_barrier();
        write(kKeys, p_.dk);
        write_gates(paths);
        if constexpr (kDeltaRule) write_betas();
    }

    // Gradients of queries, and of keys as they ask the state, before beta.
    FA_DEVICE void find_rows(Lane& paths) const {
        const Lane gates = read_gates(), keys = read_normalized(kKeys), queries = read_normalized(kQueries);
#pragma unroll
        for (int i = 0; i < kPart; ++i) {
            const float sum = sum_before(false, kSums, i, keys, gates);
            paths.x[i] = queries.x[i] * sum;
            store_number(element(kSums, i), sum + load_number(own(false, false, first_ + i, i)) * keys.x[i]);
        }
        if (call_.normalizes) leave_along(queries, kSums, kAlongQuery);
        if constexpr (kDeltaRule)
#pragma unroll
            for (int i = 0; i < kPart; ++i) {
                const float asked = sum_before(true, kAsked, i, keys, gates);
                paths.x[i] -= planes_.load(kBetaPlane, first_ + i) * keys.x[i] * asked;
                store_number(element(kAsked, i), asked);
            }
        if constexpr (kDeltaRule) leave_along(keys, kAsked, kAskedPlane);
    }

    // What earlier tokens of the part give, and the state with those before the part, times the gates in between.
    FA_DEVICE float sum_before(bool asks, Buffer buffer, int i, const Lane& keys, const Lane& gates) const {
        float sum = load_number(element(buffer, i));
#pragma unroll
        for (int four = 0; four < i; four += 4) {
            const Four scores = Four::load(own(asks, false, first_ + i, four));
#pragma unroll
            for (int j = 0; j < 4; ++j)
                if (four + j < i) sum = scores.x[j] * keys.x[four + j] + sum * gates.x[four + j];
        }
        return sum * gates.x[i];
    }

    // Leaves the products of rows with what is in a buffer.
    FA_DEVICE void leave_along(const Lane& rows, Buffer buffer, int plane) const {
        Lane along;
#pragma unroll
        for (int i = 0; i < kPart; ++i) along.x[i] = rows.x[i] * load_number(element(buffer, i));
        leave_sums(plane, along);
    }

    // Gradients of keys. Paths become gradients of gates within the part.
    FA_DEVICE void find_keys(Lane& paths) const {
        const Lane gates = read_gates(), keys = read_normalized(kKeys), queries = read_normalized(kQueries);
        float after = 1.0f;  // the part
        for (int part = kParts - 1; part > first_ / kPart; --part) after *= load_number(part_gates(part, key_));
#pragma unroll
        for (int j = kPart - 1; j >= 0; --j) {
            float sum = load_number(element(kSums, j));
#pragma unroll
            for (int four = kPart - 4; four + 3 > j; four -= 4) {
                const Four scores = Four::load(own(false, true, first_ + j, four));
                Four asking;
                if constexpr (kDeltaRule) asking = Four::load(own(true, true, first_ + j, four));
#pragma unroll
                for (int i = 3; i >= 0; --i) {
                    if (four + i <= j) continue;
                    sum += scores.x[i] * queries.x[four + i];
                    if constexpr (kDeltaRule) sum += asking.x[i] * keys.x[four + i];
                    sum *= gates.x[four + i];
                }
            }
            paths.x[j] -= keys.x[j] * sum;
            sum += load_number(own(false, true, first_ + j, j)) * queries.x[j];
            const float to_next = load_number(element(kEnds, j)) * after;
            after *= gates.x[j];
            sum += to_next;
            if constexpr (kDeltaRule) sum -= planes_.load(kBetaPlane, first_ + j) * load_number(element(kAsked, j));
            store_number(element(kEnds, j), keys.x[j] * to_next);
            store_number(element(kSums, j), sum);
        }
        if (call_.normalizes) leave_along(keys, kSums, kAlongKey);
        add_up(paths);
    }

    // Sums paths over each gate within the part, and leaves the sums of whole parts.
    FA_DEVICE void add_up(Lane& paths) const {
#pragma unroll
        for (int i = kPart - 2; i >= 0; --i) paths.x[i] += paths.x[i + 1];
        store_number(part_sum(false, first_ / kPart, key_), paths.x[0]);
        float earlier = 0.0f;
#pragma unroll
        for (int i = 0; i < kPart; ++i) {
            paths.x[i] += earlier;
            earlier += load_number(element(kEnds, i));
        }
        store_number(part_sum(true, first_ / kPart, key_), earlier);
    }

    // Writes gradients of queries or keys; of rows that were normalized, only what is across them.
    FA_DEVICE void write(Kind kind, void* to) const {
        Lane gradients;
#pragma unroll
        for (int i = 0; i < kPart; ++i) gradients.x[i] = load_number(element(kSums, i));
        if (call_.normalizes) remove_along(gradients, kind);
        if (p_.sums_heads) {
            write_rows(static_cast<float*>(to), call_.columns_k, [&](int i) { return gradients.x[i]; });
        } else {
            write_rows(static_cast<uint16_t*>(to), call_.columns_k,
                       [&](int i) { return static_cast<uint16_t>(Operand::pack(gradients.x[i], 0.0f)); });
        }
    }

    // Writes value(i) for token i of the part into contiguous rows.
    template <class Word, class Value>
    FA_DEVICE void write_rows(Word* to, int columns, Value value) const {
        const int64_t stride = static_cast<int64_t>(call_.nheads) * columns;
        to += ((first_token() + first_) * call_.nheads + head_) * columns + key_;
#pragma unroll
        for (int i = 0; i < kPart; ++i, to += stride)
            if (has(i, columns)) *to = value(i);
    }

    FA_DEVICE void remove_along(Lane& gradients, Kind kind) const {
        const Lane rows = read_normalized(kind), lengths = read_plane(kKeyLength + kind);
        for (int part = 0; part < kColumnParts; ++part) {
            const Lane along = read_plane((kind == kKeys ? kAlongKey : kAlongQuery) + part);
#pragma unroll
            for (int i = 0; i < kPart; ++i) gradients.x[i] -= along.x[i] * rows.x[i];
        }
#pragma unroll
        for (int i = 0; i < kPart; ++i) gradients.x[i] *= lengths.x[i];
    }

    FA_DEVICE void write_gates(const Lane& paths) const {
        float others = paths_;  // of other parts, and from the state to the next one
        for (int part = 0; part < kParts; ++part) others *= load_number(part_gates(part, key_));
        for (int part = kParts - 1; part > first_ / kPart; --part) others += load_number(part_sum(false, part, key_));
        for (int part = 0; part < first_ / kPart; ++part) others += load_number(part_sum(true, part, key_));
        write_rows(p_.dg, call_.headdim_k, [&](int i) { return paths.x[i] + others; });
    }

    FA_DEVICE void write_betas() const {
        const int token = thread_index();
        if (token >= kChunk || token >= num_tokens()) return;
        p_.dbeta[(first_token() + token) * call_.nheads + head_] =
            planes_.load(kValuePlane, token) - planes_.sum(kAskedPlane, kColumnParts, token);
    }

    const uint32_t buffers_ = at_ + warp_index() * kBuffers * kBufferBytes;
    float paths_ = 0.0f;  // sum of products of elements of S and G in that dimension
};

}  // namespace fastattention

extern "C" FA_KERNEL void FA_LAUNCH_BOUNDS(fastattention::kThreads, fastattention::Config::min_ctas)
    fastattention_linear_key_gradients(FA_PARAMETER fastattention::GradientParams params) {
    fastattention::run_token_gradients<fastattention::KeyGradients>(params);
}
