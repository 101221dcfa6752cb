// Linear attention in chunks of tokens: each chunk is a few matrix products, and passes its state to the next.
//
// fastattention/backends/torch/linear.py has the formulas. Weights between tokens are products of the gates between them.
// They are built gate by gate, row by row, so that strong gates neither overflow nor lose digits. With a gate for every key
// dimension a chunk consists of parts of 16 tokens. Within a part, scores are summed one by one. Between two parts, queries
// are multiplied by the gates from the beginning of their part on and of the parts in between, keys by the gates up to the
// end of their part. With the delta rule, keys are also queries: they ask what the state and earlier tokens hold for them.
#pragma once

namespace FA_NAMESPACE {

template <class Element, class Unit>
class LinearChunks : protected ChunkProducts<Unit> {
protected:
    using Layout = LinearLayout<Unit>;
    using Products = ChunkProducts<Unit>;
    using Products::left, Products::right;

public:
    LinearChunks(const FaLinearParams& p, const LinearTask& task, float* scratch)
        : LinearChunks(p, task, scratch, Layout(p, task.num_columns, task.num_heads)) {}

    void run() {
        begin();
        for (int64_t h = 0; h < task_.num_heads; ++h) {
            begin_head(h);
            read_initial_state();
        }
        // Heads take turns with a chunk: their rows of a token are adjacent and share pages of memory.
        for (int64_t first = 0; first < task_.num_tokens; first += l_.chunk) {
            const int64_t n = smaller(l_.chunk, task_.num_tokens - first);
            for (int64_t h = 0; h < task_.num_heads; ++h) {
                begin_head(h);
                for (int64_t done = 0; done < n; done += n_) {
                    load(first + done, n - done);
                    prefetch_next(first, h);
                    compute();
                    for (int64_t i = 0; i < n_; ++i) tokens_.write(first_ + i, held_queries() + i * l_.value_stride);
                }
            }
        }
        Unit{}.end();
        for (int64_t h = 0; p_.final_state && h < task_.num_heads; ++h) {
            begin_head(h);
            for (int64_t d = 0; d < p_.headdim_k; ++d)
                narrow_row(state_ + d * l_.value_stride, tokens_.final_state(d), task_.num_columns);
        }
    }

protected:
    LinearChunks(const FaLinearParams& p, const LinearTask& task, float* scratch, Layout layout)
        : Products(scratch + layout.left, scratch + layout.right),
          p_(p),
          task_(task),
          tokens_{p, task},
          l_(layout),
          columns_(round_up(task.num_columns, Vec::kWidth)),
          keys_(scratch + l_.keys),
          asking_(scratch + l_.asking),
          queries_(scratch + l_.queries),
          keys_t_(scratch + l_.keys_t),
          scores_(scratch + l_.scores),
          query_scores_(scratch + l_.query_scores),
          held_(scratch + l_.held),
          values_(scratch + l_.values),
          states_(scratch + l_.states),
          gates_(scratch + l_.gates),
          betas_(scratch + l_.betas),
          row_(scratch + l_.row) {}

    // Makes working memory finite: rows after the last token are multiplied too.
    void begin() {
        memset(keys_, 0, (l_.keys_t - l_.keys) * sizeof(float));
        memset(keys_t_, 0, (l_.scores - l_.keys_t) * sizeof(float));
        memset(scores_, 0, (l_.held - l_.scores) * sizeof(float));
        Unit{}.begin();
    }

    void read_initial_state() {
        memset(state_, 0, l_.state_floats * sizeof(float));
        for (int64_t d = 0; p_.initial_state && d < p_.headdim_k; ++d)
            widen_row(tokens_.initial_state(d), state_ + d * l_.value_stride, task_.num_columns, task_.num_columns);
    }

    // Computes the results of the tokens that are loaded, and the state after them.
    void compute() { p_.gate_per_key ? run_key_gates() : run_head_gates(); }

    // Prefetches the same chunk of the next head, or the next chunk of the first head.
    __attribute__((always_inline)) void prefetch_next(int64_t first, int64_t h) const {
        if (++h == task_.num_heads) {
            h = 0;
            first += l_.chunk;
        }
        for (int64_t token = first; token < smaller(first + l_.chunk, task_.num_tokens); ++token)
            tokens_.prefetch_token(token, task_.head + h);
    }

    void begin_head(int64_t h) {
        tokens_.head = task_.head + h;
        state_ = states_ + h * l_.state_floats;
    }

    bool is_delta() const { return p_.overwrites; }
    float* held_queries() const { return held_ + l_.chunk * l_.value_stride; }

    // Loads at most n tokens, and sets first_ and n_. A token with a key, value, gate or beta that is not finite begins a
    // chunk: products with zero weights would carry it to earlier ones. Tokens past the last one are zeros with gates of 1,
    // which leave the state unchanged.
    void load(int64_t first, int64_t n) {
        first_ = first;
        for (n_ = 0; n_ < n; ++n_) {
            load_token(n_);
            if (splits_ && n_ > 0 && !is_finite(n_)) break;
        }
        for (int64_t i = n_; i < l_.chunk; ++i) {
            memset(keys_ + i * l_.key_stride, 0, l_.key_columns * sizeof(float));
            memset(queries_ + i * l_.key_stride, 0, l_.key_columns * sizeof(float));
            memset(values_ + i * l_.value_stride, 0, columns_ * sizeof(float));
            betas_[i] = 0.0f;
            for (int64_t d = 0; d < gate_columns(); ++d) gates_[i * gate_stride() + d] = 1.0f;
        }
    }

    int64_t gate_columns() const { return p_.gate_per_key ? l_.key_columns : 1; }
    int64_t gate_stride() const { return p_.gate_per_key ? l_.key_stride : 1; }

    void load_token(int64_t i) {
        tokens_.key(first_ + i, keys_ + i * l_.key_stride, l_.key_columns);
        tokens_.query(first_ + i, queries_ + i * l_.key_stride, l_.key_columns);
        tokens_.value(first_ + i, values_ + i * l_.value_stride, columns_);
        betas_[i] = p_.beta ? tokens_.beta(first_ + i) : 1.0f;
        if (p_.gate_per_key) return tokens_.gates(first_ + i, gates_ + i * l_.key_stride, l_.key_columns);
        gates_[i] = tokens_.gate(first_ + i);
    }

    bool is_finite(int64_t i) const {
        Vec sum = broadcast(betas_[i]) * zero();
        const auto look = [&](const float* row, int64_t columns) {
            for (int64_t c = 0; c < columns; c += Vec::kWidth) sum = fma(load_vector(row + c), zero(), sum);
        };
        look(keys_ + i * l_.key_stride, l_.key_columns);
        look(values_ + i * l_.value_stride, columns_);
        if (p_.gate_per_key) {
            look(gates_ + i * l_.key_stride, l_.key_columns);
        } else {
            sum = fma(broadcast(gates_[i]), zero(), sum);
        }
        return reduce_add(sum) == 0.0f;
    }

    // Computes products of asking keys and queries with keys; gates are multiplied into them later.
    Operand score_head_gates() {
        transpose_units(keys_, l_.key_stride, keys_t_, l_.chunk, l_.chunk, round_up(p_.headdim_k, Vec::kWidth));
        const Operand tokens = left(first_asking(), l_.key_stride, num_asking(), l_.key_depth);
        const Operand keys = right(keys_t_, l_.chunk, l_.key_depth, l_.chunk);
        for (int64_t chunk = 0; chunk < num_asking(); chunk += l_.chunk) {
            float* scores = is_delta() && chunk == 0 ? scores_ : query_scores_;
            for (int64_t i = 0; i < l_.chunk; i += Layout::kStepRows)
                multiply_operands<false, Unit>(row_of(tokens, chunk + i), keys, l_.key_depth, scores + i * l_.chunk, l_.chunk,
                                               Layout::kStepRows,
                                               smaller(round_up(i + Layout::kStepRows, Vec::kWidth), l_.chunk));
        }
        return tokens;
    }

    void run_head_gates() {
        ask_state(score_head_gates());
        float* const weights = row_;  // weights[j]: the product of the gates after token j up to token i
        float* const since = row_ + l_.chunk;  // products of gates since the beginning of the chunk
        memset(weights, 0, l_.chunk * sizeof(float));
        float all = 1.0f;
        for (int64_t i = 0; i < l_.chunk; ++i) {
            since[i] = all *= gates_[i];
            for (int64_t j = 0; j < i; j += Vec::kWidth) store(weights + j, load_vector(weights + j) * broadcast(gates_[i]));
            weights[i] = 1.0f;
            if (asks_queries_) weigh(i, query_scores_ + i * l_.chunk, weights);
            if (is_delta()) weigh_system(i, weights, since[i]);
        }
        if (is_delta()) find_updates();
        if (asks_queries_) {
            scale_rows(held_queries(), since);
            add_values();
        }
        // The weights for the last token are the factors of the values in the state.
        scale_rows(values_, weights);
        add_to_state([&](int64_t) { return all; });
    }

    // The rows that are multiplied with keys and with the state: asking keys of the delta rule, then queries.
    int64_t num_asking() const { return (is_delta() + asks_queries_) * l_.chunk; }
    const float* first_asking() const { return is_delta() ? asking_ : queries_; }

    // Multiplies these rows with the state before the chunk.
    void ask_state(Operand rows) const {
        multiply_operands<false, Unit>(rows, right(state_, l_.value_stride, l_.key_depth, columns_), l_.key_depth,
                                       is_delta() ? held_ : held_queries(), l_.value_stride, num_asking(), columns_);
    }

    // Weighs the scores of token i with the tokens up to it; scores with later tokens become 0.
    void weigh(int64_t i, float* scores, const float* weights) const {
        for (int64_t j = 0; j <= i; j += Vec::kWidth) store(scores + j, load_vector(scores + j) * load_vector(weights + j));
        for (int64_t j = i + 1; j < l_.chunk; ++j) scores[j] = 0.0f;
    }

    // Computes row i of the triangular system and of its right side: v less what the state holds for the key.
    void weigh_system(int64_t i, const float* weights, float since) {
        float* system = scores_ + i * l_.chunk;
        weigh(i, system, weights);
        for (int64_t j = 0; j <= i; j += Vec::kWidth)
            store(system + j, zero() - load_vector(system + j) * load_vector(betas_ + j));
        float* value = values_ + i * l_.value_stride;
        const float* held = held_ + i * l_.value_stride;
        for (int64_t c = 0; c < columns_; c += Vec::kWidth)
            store(value + c, load_vector(value + c) - broadcast(since) * load_vector(held + c));
    }

    // Turns the right side into updates: what v adds to what the state and earlier tokens hold for the key, times beta.
    void find_updates() {
        solve();
        if (kept_) memcpy(kept_, values_, l_.chunk * l_.value_stride * sizeof(float));
        scale_rows(values_, betas_);
    }

    // Solves x_i = right_i + sum_{j<i} system_ij x_j in place of the values. The rows of a tile first add all earlier tiles
    // in one product, then are solved in order. The last tile may write rows after the chunk, which are not read.
    void solve() {
        for (int64_t first = 0; first < l_.chunk; first += FloatUnit::kRowStep) {
            const float* system = scores_ + first * l_.chunk;
            float* rows = values_ + first * l_.value_stride;
            if (first > 0)
                multiply_operands<true, FloatUnit>({system, l_.chunk}, {values_, l_.value_stride}, first, rows,
                                                   l_.value_stride, FloatUnit::kRowStep, columns_);
            for (int64_t c = 0; c < columns_; c += Vec::kWidth) {
                Vec u[FloatUnit::kRowStep];
#pragma GCC unroll 16
                for (int i = 0; i < FloatUnit::kRowStep; ++i) {
                    u[i] = load_vector(rows + i * l_.value_stride + c);
#pragma GCC unroll 16
                    for (int j = 0; j < i; ++j) u[i] = fma(broadcast(system[i * l_.chunk + first + j]), u[j], u[i]);
                    store(rows + i * l_.value_stride + c, u[i]);
                }
            }
        }
    }

    // Adds the weighted values of the chunk's tokens to results, which have the contribution of the state already.
    void add_values() {
        const Operand scores = left(query_scores_, l_.chunk, l_.chunk, l_.chunk);
        const Operand values = right(values_, l_.value_stride, l_.chunk, columns_);
        for (int64_t i = 0; i < l_.chunk; i += Layout::kStepRows)
            multiply_operands<true, Unit>(row_of(scores, i), values, smaller(i + Layout::kStepRows, l_.chunk),
                                          held_queries() + i * l_.value_stride, l_.value_stride, Layout::kStepRows, columns_);
    }

    // all: the product of the gates of the chunk, for each key dimension.
    template <class All>
    void add_to_state(All all) {
        float* const to = next_state_ ? next_state_ : state_;
        for (int64_t d = 0; d < p_.headdim_k; ++d)
            for (int64_t c = 0; c < columns_; c += Vec::kWidth)
                store(to + d * l_.value_stride + c, load_vector(state_ + d * l_.value_stride + c) * broadcast(all(d)));
        if (next_state_)  // rows that only pad the depth of products
            memset(to + p_.headdim_k * l_.value_stride, 0,
                   (l_.state_floats - p_.headdim_k * l_.value_stride) * sizeof(float));
        state_ = to;
        multiply_operands<true, Unit>(left(keys_t_, l_.chunk, l_.key_rows, l_.chunk),
                                      right(values_, l_.value_stride, l_.chunk, columns_), l_.chunk, state_, l_.value_stride,
                                      l_.key_rows, columns_);
    }

    void scale_row(float* row, Vec factor) const {
        for (int64_t c = 0; c < columns_; c += Vec::kWidth) store(row + c, load_vector(row + c) * factor);
    }
    void scale_rows(float* rows, const float* factors) const {
        for (int64_t i = 0; i < l_.chunk; ++i) scale_row(rows + i * l_.value_stride, broadcast(factors[i]));
    }

    // The product of the gates of each part.
    float* part_gates() const { return row_ + l_.key_columns; }

    // Computes scores within parts. Rows and keys get the gates of their part.
    void score_within_parts() {
        if (is_delta()) memcpy(asking_, keys_, l_.chunk * l_.key_stride * sizeof(float));
        for (int64_t first = 0; first < l_.chunk; first += kPartTokens) {
            if (is_delta()) score_part(first, asking_, scores_);
            if (asks_queries_) score_part(first, queries_, query_scores_);
            carry_keys(first, part_gates() + first / kPartTokens * l_.key_columns);
        }
    }

    // Computes scores between parts. Rows get the gates of all parts before theirs.
    void score_between_parts() {
        if (is_delta()) score_parts(asking_, scores_);
        if (asks_queries_) score_parts(queries_, query_scores_);
    }

    void run_key_gates() {
        score_within_parts();
        score_between_parts();
        ask_state(left(first_asking(), l_.key_stride, num_asking(), l_.key_depth));
        if (is_delta()) {
            float* const ones = room_for_rows();
            for (int64_t j = 0; j < l_.chunk; j += Vec::kWidth) store(ones + j, broadcast(1.0f));
            for (int64_t i = 0; i < l_.chunk; ++i) weigh_system(i, ones, 1.0f);
            find_updates();
        }
        if (asks_queries_) add_values();
        const float* all = carry_keys_to_end();
        add_to_state([&](int64_t d) { return all[d]; });
    }

    // Rows of a part, after the gates.
    float* room_for_rows() const { return row_ + (1 + l_.chunk / kPartTokens) * l_.key_columns; }

    // Computes the scores of rows with tokens of parts before theirs, and multiplies the rows by all gates up to theirs.
    void score_parts(float* rows, float* scores) {
        float* const all = row_;  // the product of all gates before the current part
        for (int64_t d = 0; d < l_.key_columns; d += Vec::kWidth) store(all + d, broadcast(1.0f));
        for (int64_t part = 0; part < l_.chunk / kPartTokens; ++part) {
            const int64_t first = part * kPartTokens;
            score_parts_before(part, rows, scores);
            for (int64_t i = first; i < first + kPartTokens; ++i) multiply_key_row(rows + i * l_.key_stride, all);
            multiply_key_row(all, part_gates() + part * l_.key_columns);
        }
    }

    void multiply_key_row(float* row, const float* factors) const {
        for (int64_t d = 0; d < l_.key_columns; d += Vec::kWidth)
            store(row + d, load_vector(row + d) * load_vector(factors + d));
    }

    // Computes the scores among the tokens of a part, and multiplies the asking rows by the gates of the part up to theirs.
    void score_part(int64_t first, float* rows, float* scores) {
        for (int64_t i = first; i < first + kPartTokens; ++i) {
            Vec sums[kPartTokens];
            for (Vec& sum : sums) sum = zero();
            for (int64_t d = 0; d < l_.key_columns; d += kPartColumns) {
                float* query = rows + i * l_.key_stride + d;
                Vec carried[kPartVectors];
                for (int64_t c = 0; c < kPartVectors; ++c) carried[c] = load_vector(query + c * Vec::kWidth);
                for (int64_t j = i; j >= first; --j) {
                    const float *key = keys_ + j * l_.key_stride + d, *gate = gates_ + j * l_.key_stride + d;
#pragma GCC unroll 4
                    for (int64_t c = 0; c < kPartVectors; ++c) {
                        sums[j - first] = fma(carried[c], load_vector(key + c * Vec::kWidth), sums[j - first]);
                        carried[c] = carried[c] * load_vector(gate + c * Vec::kWidth);
                    }
                }
                for (int64_t c = 0; c < kPartVectors; ++c) store(query + c * Vec::kWidth, carried[c]);
            }
            float* to = scores + i * l_.chunk + first;
            for (int64_t j = 0; j < kPartTokens; j += Vec::kWidth) store(to + j, reduce_columns(sums + j));
        }
    }

    // Multiplies each key of a part by the gates after it, up to the end of the part. gates_of_part: set to the product of
    // all gates of the part.
    void carry_keys(int64_t first, float* gates_of_part) {
        for (int64_t d = 0; d < l_.key_columns; d += Vec::kWidth) {
            Vec after = broadcast(1.0f);
            for (int64_t j = first + kPartTokens - 1; j >= first; --j) {
                float* key = keys_ + j * l_.key_stride + d;
                store(key, load_vector(key) * after);
                after = after * load_vector(gates_ + j * l_.key_stride + d);
            }
            store(gates_of_part + d, after);
        }
        transpose_units(keys_ + first * l_.key_stride, l_.key_stride, keys_t_ + first, l_.chunk, kPartTokens,
                        round_up(p_.headdim_k, Vec::kWidth));
    }

    // Computes the scores of the tokens of a part with tokens of earlier parts. Whole tiles of rows are multiplied: scores
    // of the next part that this writes are overwritten later.
    void score_parts_before(int64_t part, const float* asking, float* scores) {
        const int64_t first = part * kPartTokens;
        float* const rows = room_for_rows();
        for (int64_t i = 0; i < kPartTileRows; ++i)
            memcpy(rows + i * l_.key_stride, asking + (first + i) * l_.key_stride, l_.key_columns * sizeof(float));
        for (int64_t other = part - 1; other >= 0; --other) {
            for (int64_t i = 0; other < part - 1 && i < kPartTokens; ++i)
                multiply_key_row(rows + i * l_.key_stride, part_gates() + (other + 1) * l_.key_columns);
            const int64_t column = other * kPartTokens;
            multiply_operands<false, FloatUnit>({rows, l_.key_stride}, {keys_t_ + column, l_.chunk}, p_.headdim_k,
                                                scores + first * l_.chunk + column, l_.chunk, kPartTileRows, kPartTokens);
        }
    }

    // Multiplies the keys of each part by the gates of the later parts. Returns the product of all gates.
    const float* carry_keys_to_end() {
        for (int64_t d = 0; d < p_.headdim_k; ++d) {
            float after = 1.0f;
            for (int64_t part = l_.chunk / kPartTokens - 1; part >= 0; --part) {
                float* keys = keys_t_ + d * l_.chunk + part * kPartTokens;
                for (int64_t j = 0; j < kPartTokens; j += Vec::kWidth)
                    store(keys + j, load_vector(keys + j) * broadcast(after));
                after *= part_gates()[part * l_.key_columns + d];
            }
            row_[d] = after;
        }
        return row_;
    }

    const FaLinearParams& p_;
    const LinearTask& task_;
    LinearTokens<Element> tokens_;
    const Layout l_;
    const int64_t columns_;
    float* const keys_;
    float* const asking_;  // keys of the delta rule as queries; keys_ themselves if gates are of heads
    float* const queries_;
    float* const keys_t_;
    float* const scores_;  // of asking keys
    float* const query_scores_;
    float* const held_;  // products of keys and queries with the state before the chunk
    float* const values_;
    float* const states_;
    float* const gates_;
    float* const betas_;  // zeros after the last token
    float* const row_;
    float* state_ = nullptr;  // the state of the current head
    int64_t first_ = 0, n_ = 0;

    // For gradients, which first need states alone.
    bool asks_queries_ = true;
    bool splits_ = true;  // whether a token that is not finite begins a chunk
    float* next_state_ = nullptr;  // where the state after a chunk is written, if not in place of the one before
    float* kept_ = nullptr;  // where updates without beta are kept, if they are
};

}  // namespace FA_NAMESPACE
