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
    const float *const between = ends_, *const since = token_sums_, *const after = between + (n - 1) * n;
    float *const arriving = token_sums_ + n, *const leaving = arriving + n, *const ending = leaving + n;
    float* const paths = ending + n;
    memset(arriving, 0, 2 * n * sizeof(float));
    float all_paths = 0.0f;  // from the state to the next state
    for (int64_t d = 0; d < p_.headdim_k; ++d)
        all_paths += dot(state_ + d * l_.value_stride, state_gradient_ + d * l_.value_stride, columns_);
    all_paths *= since[n - 1];

    for (int64_t row = 0; row < l_.rows; ++row) {
        const int64_t i = row % n;
        float* const gradients = score_gradients_ + row * n;
        const float* weights = (row < l_.rows - n ? scores_ : query_scores_) + i * n;
        for (int64_t j = 0; j < n; j += Vec::kWidth) {
            store(paths + j, load_vector(gradients + j) * load_vector(weights + j));
            store(gradients + j, load_vector(gradients + j) * load_vector(between + i * n + j));
        }
        paths[i] = 0.0f;  // a token's own gate is not between it and itself
        if (row < l_.rows - n) gradients[i] = 0.0f;
        for (int64_t j = i + 1; j < n; ++j) gradients[j] = paths[j] = 0.0f;
        Vec sum = zero();
        for (int64_t j = 0; j < n; j += Vec::kWidth) {
            sum = sum + load_vector(paths + j);
            store(leaving + j, load_vector(leaving + j) + load_vector(paths + j));
        }
        float* const asking = asking_gradients_ + row * l_.key_stride;
        const float* const asker = first_asking() + row * l_.key_stride;
        for (int64_t d = 0; d < l_.key_vectors; d += Vec::kWidth)
            store(asking + d, load_vector(asking + d) * broadcast(since[i]));
        arriving[i] += reduce_add(sum) + dot(asker, asking, l_.key_vectors);
    }
    for (int64_t j = 0; j < n; ++j) {
        float* const key = key_gradients_ + j * l_.key_stride;
        for (int64_t d = 0; d < l_.key_vectors; d += Vec::kWidth) store(key + d, load_vector(key + d) * broadcast(after[j]));
        ending[j] = dot(keys_ + j * l_.key_stride, key, l_.key_vectors);
    }
    multiply_operands<true, Unit>(left(score_gradients_, n, l_.rows, n), right(keys_, l_.key_stride, n, l_.key_vectors), n,
                                  asking_gradients_, l_.key_stride, l_.rows, l_.key_vectors);
    turn_score_gradients();
    multiply_operands<true, Unit>(left(turned_scores_, l_.rows, n, l_.rows),
                                  right(first_asking(), l_.key_stride, l_.rows, l_.key_vectors), l_.rows, key_gradients_,
                                  l_.key_stride, n, l_.key_vectors);

    for (int64_t first = 0; first < l_.rows; first += n) scale_rows(row_gradients_ + first * l_.value_stride, since);
    step_state_gradient([&](int64_t) { return since[n - 1]; });

    float later = 0.0f, earlier = all_paths;
    for (int64_t i = n - 1; i >= 0; --i) gate_gradients_[i] = later += arriving[i] - leaving[i];
    for (int64_t i = 0; i < n; ++i) {
        gate_gradients_[i] += earlier;
        earlier += ending[i];
    }
}

}  // namespace FA_NAMESPACE
