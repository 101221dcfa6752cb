// Gradients of linear attention in chunks of tokens. States before chunks are computed first and kept, then chunks follow from
// the last to the first, and pass the gradient of the state on. With the names of fastattention/backends/torch/linear.py:
//
//     dU = A^T dO + K_end dS'        A: weights of queries and keys; K_end: keys times the gates after them
//     dU -= M^T (beta dU)            delta rules, from the last token to the first; M: weights of keys and keys
//     N  = -beta dU,  dV = -N        delta rules; dV = beta dU otherwise
//     dA = dO U^T,  dM = N U^T       for tokens before (and for dA itself)
//     dQ = dA K + dO S^T             dK = dM K + N S^T + dA^T Q + dM^T K + U dS'^T, each with the gates in between
//     dS = a dS' + Q^T dO + K^T N    with the gates since the beginning of the chunk
//
// A gate is a factor of every path from an earlier token, or the state, to a later one, or the next state. The gradient of
// its logarithm is the sum over these paths, of products that the gradients of keys and queries consist of.
// head_gate_gradients.hpp and key_gate_gradients.hpp have what depends on the kind of gates.
#pragma once

namespace FA_NAMESPACE {

template <class Element, class Unit>
class LinearGradients : LinearChunks<Element, Unit> {
    using Base = LinearChunks<Element, Unit>;
    using Layout = GradientLayout<Unit>;
    using Base::left, Base::right, Base::is_delta, Base::first_asking, Base::scale_row, Base::scale_rows;
    using Base::p_, Base::task_, Base::tokens_, Base::columns_, Base::keys_, Base::asking_, Base::queries_, Base::scores_;
    using Base::query_scores_, Base::values_, Base::gates_, Base::betas_, Base::state_, Base::row_, Base::n_, Base::first_;
    using Base::weigh, Base::multiply_key_row, Base::part_gates, Base::room_for_rows;

public:
    LinearGradients(const FaLinearParams& p, const FaLinearGradients& gradients, const LinearTask& task, int64_t part,
                    float* scratch)
        : LinearGradients(p, gradients, task, part, scratch, Layout(p, task.num_tokens)) {}

    void run() {
        this->begin();
        memset(state_gradient_, 0, (kept_states_ - state_gradient_) * sizeof(float));
        memset(values_, 0, l_.chunk * l_.value_stride * sizeof(float));  // also columns that only pad the depth of a product
        for (int64_t h = 0; h < task_.num_heads; ++h) {
            this->begin_head(0);
            tokens_.head = task_.head + h;
            run_head(h == 0);
        }
        Unit{}.end();
    }

private:
    LinearGradients(const FaLinearParams& p, const FaLinearGradients& gradients, const LinearTask& task, int64_t part,
                    float* scratch, Layout layout)
        : Base(p, task, scratch, layout),
          gradients_(gradients),
          part_(part),
          l_(layout),
          state_gradient_(scratch + layout.state_gradient),
          turned_state_(scratch + layout.turned_state),
          row_gradients_(scratch + layout.row_gradients),
          update_gradients_(scratch + layout.updates),
          score_gradients_(scratch + layout.score_gradients),
          turned_scores_(scratch + layout.turned_scores),
          square_(scratch + layout.square),
          asking_gradients_(scratch + layout.asking_gradients),
          key_gradients_(scratch + layout.key_gradients),
          turned_asking_(scratch + layout.turned_asking),
          gate_gradients_(scratch + layout.gate_gradients),
          token_sums_(scratch + layout.token_sums),
          raw_(scratch + layout.raw),
          carried_(scratch + layout.carried),
          ends_(scratch + layout.ends),
          kept_states_(scratch + layout.kept_states),
          kept_updates_(scratch + layout.kept_updates) {
        this->splits_ = false;
    }

    void run_head(bool is_first_of_part) {
        keep_states();
        read_state_gradient();
        skip_gradient_ = 0.0f;
        for (int64_t chunk = num_chunks() - 1; chunk >= 0; --chunk) {
            state_ = kept_states_ + chunk * l_.state_floats;
            run_chunk(chunk, is_first_of_part);
        }
        write_state_gradient();
        if (gradients_.dskip) gradients_.dskip[task_.sequence * p_.nheads + tokens_.head] = skip_gradient_;
    }

    int64_t num_chunks() const { return (task_.num_tokens + l_.chunk - 1) / l_.chunk; }
    void load_chunk(int64_t chunk) { this->load(chunk * l_.chunk, smaller(l_.chunk, task_.num_tokens - chunk * l_.chunk)); }

    // Computes and keeps the state before each chunk, and updates of delta rules before they are multiplied by beta.
    void keep_states() {
        this->asks_queries_ = false;
        state_ = kept_states_;
        this->read_initial_state();
        for (int64_t chunk = 0; chunk < num_chunks(); ++chunk) {
            load_chunk(chunk);
            prefetch_chunk(chunk + 1);
            this->next_state_ = state_ + l_.state_floats;
            if (is_delta()) this->kept_ = kept_updates_ + chunk * l_.chunk * l_.value_stride;
            this->compute();
        }
        this->asks_queries_ = true;
    }

    // Rows of a token are far from those of the next one, so hardware does not prefetch them in time.
    __attribute__((always_inline)) void prefetch_chunk(int64_t chunk) const {
        for (int64_t i = 0; i < l_.chunk && chunk >= 0; ++i) {
            const int64_t token = chunk * l_.chunk + i;
            if (token >= task_.num_tokens) return;
            tokens_.prefetch_token(token, tokens_.head);
            const int64_t row = token_head(token - first_) * p_.headdim_v, bytes = p_.headdim_v * sizeof(Element);
            if (this->asks_queries_ && gradients_.dout)
                prefetch_bytes(static_cast<const Element*>(gradients_.dout) + row, bytes);
        }
    }

    void run_chunk(int64_t chunk, bool is_first_of_part) {
        load_chunk(chunk);
        load_output_gradients();
        prefetch_chunk(chunk - 1);
        if (is_delta()) read_updates(kept_updates_ + chunk * l_.chunk * l_.value_stride);
        p_.gate_per_key ? prepare_key_gates() : prepare_head_gates();
        add_output_gradients();
        if (is_delta()) solve_backward();
        write_value_gradients(kept_updates_ + chunk * l_.chunk * l_.value_stride);
        find_products();
        p_.gate_per_key ? finish_key_gates() : finish_head_gates();
        write_key_gradients(is_first_of_part);
        write_gate_gradients();
    }

    float* output_gradients() const { return row_gradients_ + (l_.rows - l_.chunk) * l_.value_stride; }

    void load_output_gradients() {
        for (int64_t i = 0; i < l_.chunk; ++i) {
            float* to = output_gradients() + i * l_.value_stride;
            memset(to, 0, columns_ * sizeof(float));
            if (gradients_.dout && i < n_)
                widen_row(static_cast<const Element*>(gradients_.dout) + out_row(i), to, p_.headdim_v, columns_);
        }
    }

    // Offsets of rows of contiguous gradients: of a token of the head, and of its key head.
    int64_t token_head(int64_t i) const {
        return (task_.batch * p_.seqlen + task_.first_token + first_ + i) * p_.nheads + tokens_.head;
    }
    int64_t out_row(int64_t i) const { return token_head(i) * p_.headdim_v; }
    int64_t key_row(int64_t i) const {
        const int64_t batches = p_.cu_seqlens ? 1 : p_.num_sequences;
        const int64_t token = (part_ * batches + task_.batch) * p_.seqlen + task_.first_token + first_ + i;
        return (token * p_.nheads_k + tokens_.head / (p_.nheads / p_.nheads_k)) * p_.headdim_k;
    }

    void read_updates(const float* kept) {
        memcpy(values_, kept, l_.chunk * l_.value_stride * sizeof(float));
        scale_rows(values_, betas_);
    }

    // Adds what outputs of the chunk take from updates.
    void add_output_gradients() {
        transpose_units(query_scores_, l_.chunk, square_, l_.chunk, l_.chunk, l_.chunk);
        multiply_operands<true, Unit>(left(square_, l_.chunk, l_.chunk, l_.chunk),
                                      right(output_gradients(), l_.value_stride, l_.chunk, columns_), l_.chunk,
                                      update_gradients_, l_.value_stride, l_.chunk, columns_);
    }

    // Solves x_j = dU_j - sum_{i>j} M_ij beta_i x_i in place, as LinearChunks::solve does from the first token on.
    void solve_backward() {
        const int64_t n = l_.chunk;
        transpose_units(scores_, n, square_, n, n, n);
        for (int64_t j = 0; j < n; ++j)
            for (int64_t i = 0; i < n; i += Vec::kWidth)
                store(square_ + j * n + i, zero() - load_vector(square_ + j * n + i) * load_vector(betas_ + i));
        constexpr int64_t kStep = FloatUnit::kRowStep;
        for (int64_t first = (n - 1) / kStep * kStep; first >= 0; first -= kStep) {
            const int64_t next = first + kStep;
            float* rows = update_gradients_ + first * l_.value_stride;
            if (next < n)
                multiply_operands<true, FloatUnit>({square_ + first * n + next, n},
                                                   {update_gradients_ + next * l_.value_stride, l_.value_stride}, n - next,
                                                   rows, l_.value_stride, kStep, columns_);
            for (int64_t j = smaller(next, n) - 2; j >= first; --j)
                for (int64_t i = j + 1; i < smaller(next, n); ++i)
                    add_row(update_gradients_ + j * l_.value_stride, square_[j * n + i],
                            update_gradients_ + i * l_.value_stride);
        }
    }

    void add_row(float* to, float factor, const float* from) const {
        for (int64_t c = 0; c < columns_; c += Vec::kWidth)
            store(to + c, fma(broadcast(factor), load_vector(from + c), load_vector(to + c)));
    }

    static float dot(const float* a, const float* b, int64_t columns) {
        Vec sum = zero();
        for (int64_t c = 0; c < columns; c += Vec::kWidth) sum = fma(load_vector(a + c), load_vector(b + c), sum);
        return reduce_add(sum);
    }

    // Gradients of values and beta. updates: those of delta rules before they are multiplied by beta. With delta rules, N
    // takes the first rows of row_gradients_.
    void write_value_gradients(const float* updates) {
        alignas(64) float value[kMostColumns];
        for (int64_t i = 0; i < n_; ++i) {
            float* gradient = update_gradients_ + i * l_.value_stride;
            if (p_.beta || p_.skip) tokens_.value_as_given(first_ + i, value, columns_);
            if (p_.beta)
                gradients_.dbeta[token_head(i)] = dot(gradient, is_delta() ? updates + i * l_.value_stride : value, columns_);
            scale_row(gradient, broadcast(betas_[i]));
            if (is_delta())
                for (int64_t c = 0; c < columns_; c += Vec::kWidth)
                    store(row_gradients_ + i * l_.value_stride + c, zero() - load_vector(gradient + c));
            if (p_.skip) {
                const float* output = output_gradients() + i * l_.value_stride;
                skip_gradient_ += dot(output, value, columns_);
                add_row(gradient, p_.skip[tokens_.head], output);
            }
            narrow_row(gradient, static_cast<Element*>(gradients_.dv) + out_row(i), p_.headdim_v);
        }
        if (is_delta()) memset(row_gradients_ + n_ * l_.value_stride, 0, (l_.chunk - n_) * l_.value_stride * sizeof(float));
    }

    // Products of N and dO with updates and with the state, and of updates with the gradient of the next state.
    void find_products() {
        const int64_t n = l_.chunk;
        const Operand rows = left(row_gradients_, l_.value_stride, l_.rows, l_.value_depth);
        transpose_units(values_, l_.value_stride, turned_state_, n, n, columns_);
        memset(turned_state_ + columns_ * n, 0, (l_.value_depth - columns_) * n * sizeof(float));
        multiply_operands<false, Unit>(rows, right(turned_state_, n, l_.value_depth, n), l_.value_depth, score_gradients_, n,
                                       l_.rows, n);
        turn_state(state_);
        multiply_operands<false, Unit>(rows, right(turned_state_, l_.key_stride, l_.value_depth, l_.key_vectors),
                                       l_.value_depth, asking_gradients_, l_.key_stride, l_.rows, l_.key_vectors);
        turn_state(state_gradient_);
        multiply_operands<false, Unit>(left(values_, l_.value_stride, n, l_.value_depth),
                                       right(turned_state_, l_.key_stride, l_.value_depth, l_.key_vectors), l_.value_depth,
                                       key_gradients_, l_.key_stride, n, l_.key_vectors);
    }

    void turn_state(const float* state) {
        transpose_units(state, l_.value_stride, turned_state_, l_.key_stride, l_.key_vectors, columns_);
        memset(turned_state_ + columns_ * l_.key_stride, 0, (l_.value_depth - columns_) * l_.key_stride * sizeof(float));
    }

    // Makes the gradient of the state before the chunk of that after it. asking rows and row_gradients_ have all gates.
    // all: the product of the gates of the chunk, for each key dimension.
    template <class All>
    void step_state_gradient(All all) {
        for (int64_t d = 0; d < p_.headdim_k; ++d) scale_row(state_gradient_ + d * l_.value_stride, broadcast(all(d)));
        transpose_units(first_asking(), l_.key_stride, turned_asking_, l_.rows, l_.rows, l_.key_vectors);
        multiply_operands<true, Unit>(left(turned_asking_, l_.rows, l_.key_rows, l_.rows),
                                      right(row_gradients_, l_.value_stride, l_.rows, columns_), l_.rows, state_gradient_,
                                      l_.value_stride, l_.key_rows, columns_);
    }

    // Puts the gradients of scores, transposed, side by side: those of asking keys and of queries.
    void turn_score_gradients() {
        const int64_t n = l_.chunk;
        for (int64_t first = 0; first < l_.rows; first += n)
            transpose_units(score_gradients_ + first * n, n, turned_scores_ + first, l_.rows, n, n);
    }

    void write_key_gradients(bool is_first_of_part) {
        alignas(64) float given[kMostColumns];
        for (int64_t i = 0; i < n_; ++i) {
            float* query = asking_gradients_ + (l_.rows - l_.chunk + i) * l_.key_stride;
            tokens_.query_as_given(first_ + i, given, l_.key_vectors);
            write_key_row(query, given, static_cast<float>(p_.scale), gradients_.dq, key_row(i), is_first_of_part);
            float* key = key_gradients_ + i * l_.key_stride;
            for (int64_t d = 0; is_delta() && d < l_.key_vectors; d += Vec::kWidth)
                store(key + d, load_vector(key + d) + load_vector(asking_gradients_ + i * l_.key_stride + d));
            tokens_.key_as_given(first_ + i, given, l_.key_vectors);
            write_key_row(key, given, 1.0f, gradients_.dk, key_row(i), is_first_of_part);
        }
    }

    // Writes, or adds to that of the heads before, the gradient of a row that was multiplied by `factor`, and by the inverse
    // of its length.
    void write_key_row(float* gradient, const float* given, float factor, void* to, int64_t at, bool is_first) const {
        for (int64_t d = p_.headdim_k; d < l_.key_vectors; ++d) gradient[d] = 0.0f;
        float along = 0.0f;
        if (p_.l2norm) {
            const float inverse = 1.0f / __builtin_sqrtf(dot(given, given, l_.key_vectors) + kL2NormEpsilon);
            factor *= inverse;
            along = dot(given, gradient, l_.key_vectors) * inverse * inverse;
        }
        for (int64_t d = 0; d < l_.key_vectors; d += Vec::kWidth) {
            const Vec across = load_vector(gradient + d) - broadcast(along) * load_vector(given + d);
            store(gradient + d, broadcast(factor) * across);
        }
        if (p_.nheads == p_.nheads_k) return narrow_row(gradient, static_cast<Element*>(to) + at, p_.headdim_k);
        float* const sums = static_cast<float*>(to) + at;
        for (int64_t d = 0; d < p_.headdim_k; ++d) sums[d] = is_first ? gradient[d] : sums[d] + gradient[d];
    }

    void write_gate_gradients() {
        for (int64_t i = 0; i < n_; ++i) {
            if (p_.gate_per_key) {
                narrow_row(gate_gradients_ + i * l_.key_stride, gradients_.dg + token_head(i) * p_.headdim_k, p_.headdim_k);
            } else {
                gradients_.dg[token_head(i)] = gate_gradients_[i];
            }
        }
    }

    int64_t state_at() const { return (task_.sequence * p_.nheads + tokens_.head) * p_.headdim_k * p_.headdim_v; }
    void read_state_gradient() {
        memset(state_gradient_, 0, l_.state_floats * sizeof(float));
        for (int64_t d = 0; gradients_.dfinal_state && d < p_.headdim_k; ++d)
            widen_row(gradients_.dfinal_state + state_at() + d * p_.headdim_v, state_gradient_ + d * l_.value_stride,
                      p_.headdim_v, p_.headdim_v);
    }
    void write_state_gradient() const {
        for (int64_t d = 0; gradients_.dinitial_state && d < p_.headdim_k; ++d)
            narrow_row(state_gradient_ + d * l_.value_stride, gradients_.dinitial_state + state_at() + d * p_.headdim_v,
                       p_.headdim_v);
    }

    void prepare_head_gates();
    void finish_head_gates();
    void weigh_score_gradients(int64_t i, float* between);
    void sum_paths_over_head_gates(const float* paths, const float* arriving, const float* ending, float all_paths);
    void prepare_key_gates();
    void finish_key_gates();
    void finish_rows_of_part(int64_t part, bool asks);
    void finish_keys_of_part(int64_t part);
    void add_gate_paths();

    const FaLinearGradients& gradients_;
    const int64_t part_;  // of the heads that share a key head
    const Layout l_;
    float* const state_gradient_;
    float* const turned_state_;
    float* const row_gradients_;  // N of delta rules, then dO
    float* const update_gradients_;
    float* const score_gradients_;  // dM of delta rules, then dA
    float* const turned_scores_;
    float* const square_;
    float* const asking_gradients_;  // of keys that ask, with delta rules, then of queries
    float* const key_gradients_;
    float* const turned_asking_;
    float* const gate_gradients_;
    float* const token_sums_;
    float* const raw_;  // with gates of key dimensions: keys and queries without gates
    float* const carried_;  // asking keys and queries with the gates of their part
    float* const ends_;  // paths to the next state; with gates of heads: the products of gates between tokens
    float* const kept_states_;
    float* const kept_updates_;
    float skip_gradient_ = 0.0f;
};

}  // namespace FA_NAMESPACE
