// Gradients of linear attention with a gate for every key dimension. As in chunks.hpp, a chunk consists of parts.
//
// Sums over tokens with the gates in between follow Horner's rule: a sum over earlier tokens is multiplied by a gate, then
// gets the next token's term. So the gates of whole parts are factors of whole sums.
#pragma once

namespace FA_NAMESPACE {

// Computes the weights A and M in place of scores, and what the next state takes from updates.
template <class Element, class Unit>
void LinearGradients<Element, Unit>::prepare_key_gates() {
    const int64_t n = l_.chunk, row_bytes = n * l_.key_stride * sizeof(float);
    memcpy(raw_, keys_, row_bytes);
    memcpy(raw_ + n * l_.key_stride, queries_, row_bytes);
    this->score_within_parts();
    memcpy(carried_, first_asking(), l_.rows * l_.key_stride * sizeof(float));
    this->score_between_parts();
    for (int64_t i = 0; i < n; ++i) {
        for (int64_t j = i + 1; j < n; ++j) query_scores_[i * n + j] = 0.0f;
        for (int64_t j = i; is_delta() && j < n; ++j) scores_[i * n + j] = 0.0f;
    }
    // ends_: the product of the gates after each token; row_: of all gates
    for (int64_t d = 0; d < l_.key_columns; d += Vec::kWidth) {
        Vec after = broadcast(1.0f);
        for (int64_t j = n - 1; j >= 0; --j) {
            const int64_t at = j * l_.key_stride + d;
            store(ends_ + at, after);
            store(key_gradients_ + at, load_vector(raw_ + at) * after);
            after = after * load_vector(gates_ + at);
        }
        store(row_ + d, after);
    }
    multiply_operands<false, Unit>(left(key_gradients_, l_.key_stride, n, l_.key_depth),
                                   right(state_gradient_, l_.value_stride, l_.key_depth, columns_), l_.key_depth,
                                   update_gradients_, l_.value_stride, n, columns_);
}

template <class Element, class Unit>
void LinearGradients<Element, Unit>::finish_key_gates() {
    const int64_t n = l_.chunk;
    for (int64_t row = 0; row < l_.rows; ++row) {
        float* const gradients = score_gradients_ + row * n;
        for (int64_t j = row % n + (row >= l_.rows - n); j < n; ++j) gradients[j] = 0.0f;
    }
    turn_score_gradients();
    memset(gate_gradients_, 0, n * l_.key_stride * sizeof(float));
    // Paths to the next state are added last: where gates are strong, others would drown in their rounding errors.
    for (int64_t j = 0; j < n; ++j) multiply_key_row(ends_ + j * l_.key_stride, key_gradients_ + j * l_.key_stride);
    for (int64_t part = 0; part < n / kPartTokens; ++part) {
        if (is_delta()) finish_rows_of_part(part, true);
        finish_rows_of_part(part, false);
        finish_keys_of_part(part);
    }
    add_gate_paths();
    step_state_gradient([&](int64_t d) { return row_[d]; });
}

// Adds to the gradients of rows of a part what tokens before each give. asks: asking keys; otherwise queries.
template <class Element, class Unit>
void LinearGradients<Element, Unit>::finish_rows_of_part(int64_t part, bool asks) {
    const int64_t n = l_.chunk, first = part * kPartTokens, row = (asks ? 0 : l_.rows - n) + first;
    float* const rows = room_for_rows();
    memcpy(rows, asking_gradients_ + row * l_.key_stride, kPartTileRows * l_.key_stride * sizeof(float));
    for (int64_t other = 0; other < part; ++other) {
        for (int64_t i = 0; i < kPartTokens; ++i)
            multiply_key_row(rows + i * l_.key_stride, part_gates() + other * l_.key_columns);
        multiply_operands<true, FloatUnit>({score_gradients_ + row * n + other * kPartTokens, n},
                                           {keys_ + other * kPartTokens * l_.key_stride, l_.key_stride}, kPartTokens, rows,
                                           l_.key_stride, kPartTileRows, l_.key_vectors);
    }
    const float* const askers = raw_ + (asks ? 0 : n * l_.key_stride);
    for (int64_t i = first; i < first + kPartTokens; ++i) {
        const float* const scores = score_gradients_ + (row - first + i) * n;
        for (int64_t d = 0; d < l_.key_vectors; d += Vec::kWidth) {
            Vec sum = load_vector(rows + (i - first) * l_.key_stride + d);
            for (int64_t j = first; j < i; ++j)
                sum = fma(broadcast(scores[j]), load_vector(raw_ + j * l_.key_stride + d),
                          sum * load_vector(gates_ + j * l_.key_stride + d));
            sum = sum * load_vector(gates_ + i * l_.key_stride + d);
            float* const paths = gate_gradients_ + i * l_.key_stride + d;
            store(paths, fma(load_vector(askers + i * l_.key_stride + d), sum, load_vector(paths)));
            if (!asks) sum = fma(broadcast(scores[i]), load_vector(raw_ + i * l_.key_stride + d), sum);
            store(asking_gradients_ + (row - first + i) * l_.key_stride + d, sum);
        }
    }
}

// Adds to the gradients of keys of a part what tokens after each take.
template <class Element, class Unit>
void LinearGradients<Element, Unit>::finish_keys_of_part(int64_t part) {
    const int64_t n = l_.chunk, first = part * kPartTokens;
    float* const rows = room_for_rows();
    memset(rows, 0, kPartTileRows * l_.key_stride * sizeof(float));
    for (int64_t other = n / kPartTokens - 1; other > part; --other) {
        for (int64_t j = 0; j < kPartTokens; ++j)
            multiply_key_row(rows + j * l_.key_stride, part_gates() + other * l_.key_columns);
        for (int64_t half = 0; half < l_.rows; half += n)
            multiply_operands<true, FloatUnit>({turned_scores_ + first * l_.rows + half + other * kPartTokens, l_.rows},
                                               {carried_ + (half + other * kPartTokens) * l_.key_stride, l_.key_stride},
                                               kPartTokens, rows, l_.key_stride, kPartTileRows, l_.key_vectors);
    }
    const float* const queries = raw_ + n * l_.key_stride;
    for (int64_t j = first; j < first + kPartTokens; ++j) {
        const float* const of_queries = turned_scores_ + j * l_.rows + l_.rows - n;
        const float* const of_keys = turned_scores_ + j * l_.rows;
        for (int64_t d = 0; d < l_.key_vectors; d += Vec::kWidth) {
            Vec sum = load_vector(rows + (j - first) * l_.key_stride + d);
            for (int64_t i = first + kPartTokens - 1; i > j; --i) {
                sum = fma(broadcast(of_queries[i]), load_vector(queries + i * l_.key_stride + d), sum);
                if (is_delta()) sum = fma(broadcast(of_keys[i]), load_vector(raw_ + i * l_.key_stride + d), sum);
                sum = sum * load_vector(gates_ + i * l_.key_stride + d);
            }
            float* const paths = gate_gradients_ + j * l_.key_stride + d;
            store(paths, load_vector(paths) - load_vector(raw_ + j * l_.key_stride + d) * sum);
            sum = fma(broadcast(of_queries[j]), load_vector(queries + j * l_.key_stride + d), sum);
            store(key_gradients_ + j * l_.key_stride + d, sum + load_vector(ends_ + j * l_.key_stride + d));
        }
    }
}

// Sums the paths over each gate: those that arrive at it or later, but for those that leave later, and those to the next
// state.
template <class Element, class Unit>
void LinearGradients<Element, Unit>::add_gate_paths() {
    const int64_t n = l_.chunk;
    for (int64_t d = 0; d < l_.key_vectors; d += Vec::kWidth) {
        Vec later = zero();
        for (int64_t i = n - 1; i >= 0; --i) {
            float* const at = gate_gradients_ + i * l_.key_stride + d;
            later = later + load_vector(at);
            store(at, later);
        }
        alignas(64) float whole[Vec::kWidth] = {};
        for (int64_t lane = 0; lane < Vec::kWidth && d + lane < p_.headdim_k; ++lane)
            whole[lane] = row_[d + lane] * dot(state_ + (d + lane) * l_.value_stride,
                                               state_gradient_ + (d + lane) * l_.value_stride, columns_);
        Vec earlier = load_vector(whole);
        for (int64_t i = 0; i < n; ++i) {
            float* const at = gate_gradients_ + i * l_.key_stride + d;
            store(at, load_vector(at) + earlier);
            earlier = fma(load_vector(raw_ + i * l_.key_stride + d), load_vector(ends_ + i * l_.key_stride + d), earlier);
        }
    }
}

}  // namespace FA_NAMESPACE
