// Gradients of linear attention with a gate a head. a(i, j) is the product of the gates of tokens j+1 to i.
#pragma once

namespace FA_NAMESPACE {

// Computes a(i, j), the weights A and M in place of scores, and what the next state takes from updates.
template <class Element, class Unit>
void LinearGradients<Element, Unit>::prepare_head_gates() {
    const int64_t n = l_.chunk;
    this->score_head_gates();
    float *const between = ends_, *const since = token_sums_;
    memset(between, 0, n * sizeof(float));
    float all = 1.0f;
    for (int64_t i = 0; i < n; ++i) {
        float* const row = between + i * n;
        since[i] = all *= gates_[i];
        if (i > 0)
            for (int64_t j = 0; j < n; j += Vec::kWidth) store(row + j, load_vector(row - n + j) * broadcast(gates_[i]));
        row[i] = 1.0f;
        weigh(i, query_scores_ + i * n, row);
        if (!is_delta()) continue;
        weigh(i, scores_ + i * n, row);
        scores_[i * n + i] = 0.0f;
    }
    multiply_operands<false, Unit>(left(keys_, l_.key_stride, n, l_.key_depth),
                                   right(state_gradient_, l_.value_stride, l_.key_depth, columns_), l_.key_depth,
                                   update_gradients_, l_.value_stride, n, columns_);
    scale_rows(update_gradients_, between + (n - 1) * n);
}

// Multiplies gates into what find_products has found, adds products within the chunk, and sums the paths over each gate.
template <class Element, class Unit>
void LinearGradients<Element, Unit>::finish_head_gates() {
    const int64_t n = l_.chunk;
    float* const between = ends_;
    const float *const since = token_sums_, *const after = between + (n - 1) * n;
    float *const arriving = token_sums_ + n, *const ending = arriving + n;  // from the state, and to the next state
    float all_paths = 0.0f;                                                  // from the state to the next state
    for (int64_t d = 0; d < p_.headdim_k; ++d)
        all_paths += dot(state_ + d * l_.value_stride, state_gradient_ + d * l_.value_stride, columns_);
    all_paths *= since[n - 1];

    for (int64_t j = 0; j < n; ++j) {
        float* const key = key_gradients_ + j * l_.key_stride;
        for (int64_t d = 0; d < l_.key_vectors; d += Vec::kWidth) store(key + d, load_vector(key + d) * broadcast(after[j]));
        ending[j] = dot(keys_ + j * l_.key_stride, key, l_.key_vectors);
    }
    for (int64_t i = 0; i < n; ++i) {
        arriving[i] = 0.0f;
        for (int64_t row = i; row < l_.rows; row += n) {
            float* const asking = asking_gradients_ + row * l_.key_stride;
            const float* const asker = first_asking() + row * l_.key_stride;
            for (int64_t d = 0; d < l_.key_vectors; d += Vec::kWidth)
                store(asking + d, load_vector(asking + d) * broadcast(since[i]));
            arriving[i] += dot(asker, asking, l_.key_vectors);
        }
        weigh_score_gradients(i, between + i * n);
    }
    multiply_operands<true, Unit>(left(score_gradients_, n, l_.rows, n), right(keys_, l_.key_stride, n, l_.key_vectors), n,
                                  asking_gradients_, l_.key_stride, l_.rows, l_.key_vectors);
    turn_score_gradients();
    multiply_operands<true, Unit>(left(turned_scores_, l_.rows, n, l_.rows),
                                  right(first_asking(), l_.key_stride, l_.rows, l_.key_vectors), l_.rows, key_gradients_,
                                  l_.key_stride, n, l_.key_vectors);

    for (int64_t first = 0; first < l_.rows; first += n) scale_rows(row_gradients_ + first * l_.value_stride, since);
    step_state_gradient([&](int64_t) { return since[n - 1]; });
    sum_paths_over_head_gates(between, arriving, ending, all_paths);
}

// Multiplies the products of gates before token i into the gradients of its scores. In place of these products, `between`
// gets what its paths from earlier tokens add to gradients of gates.
template <class Element, class Unit>
void LinearGradients<Element, Unit>::weigh_score_gradients(int64_t i, float* between) {
    const int64_t n = l_.chunk;
    for (int64_t j = 0; j < n; j += Vec::kWidth) {
        const Vec products = load_vector(between + j);
        Vec paths = zero();
        for (int64_t row = i; row < l_.rows; row += n) {
            const float* weights = (row < l_.rows - n ? scores_ : query_scores_) + i * n;
            float* const gradients = score_gradients_ + row * n + j;
            paths = paths + load_vector(gradients) * load_vector(weights + j);
            store(gradients, load_vector(gradients) * products);
        }
        store(between + j, paths);
    }
    for (int64_t j = i + 1; j < n; ++j) between[j] = 0.0f;
    for (int64_t row = i; row < l_.rows; row += n) {
        const bool asks = row < l_.rows - n;
        for (int64_t j = asks ? i : i + 1; j < n; ++j) score_gradients_[row * n + j] = 0.0f;
    }
}

// Gradients of gates: sums of the paths from earlier tokens, or the state, to the token or later ones, or the next state.
// Differences of sums that have more of these paths would keep their rounding errors where gates are strong.
// paths: (chunk, chunk), from a token of a column to that of a row
template <class Element, class Unit>
void LinearGradients<Element, Unit>::sum_paths_over_head_gates(const float* paths, const float* arriving, const float* ending,
                                                               float all_paths) {
    const int64_t n = l_.chunk;
    float* const from_tokens = token_sums_ + 3 * n;
    memset(from_tokens, 0, n * sizeof(float));
    float later = 0.0f, earlier = all_paths;
    for (int64_t i = n - 1; i >= 0; --i) {
        for (int64_t j = 0; j < n; j += Vec::kWidth)
            store(from_tokens + j, load_vector(from_tokens + j) + load_vector(paths + i * n + j));
        from_tokens[i] = 0.0f;  // its paths to later tokens do not cross its own gate
        Vec sum = zero();
        for (int64_t j = 0; j < n; j += Vec::kWidth) sum = sum + load_vector(from_tokens + j);
        later += arriving[i];
        gate_gradients_[i] = later + reduce_add(sum);
    }
    for (int64_t i = 0; i < n; ++i) {
        gate_gradients_[i] += earlier;
        earlier += ending[i];
    }
}

}  // namespace FA_NAMESPACE
