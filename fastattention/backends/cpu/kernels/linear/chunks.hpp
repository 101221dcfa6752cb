// Linear attention in chunks of tokens: each chunk is a few matrix products, and passes its state to the next.
//
// fastattention/backends/torch/linear.py has the formulas. Weights between tokens are products of the gates between them.
// They are built gate by gate, row by row, so that strong gates neither overflow nor lose digits. With a gate for every key
// dimension a chunk consists of parts of 16 tokens. Within a part, scores are summed one by one. Between two parts, queries
// are multiplied by the gates from the beginning of their part on and of the parts in between, keys by the gates up to the
// end of their part. With the delta rule, keys are also queries: they ask what the state and earlier tokens hold for them.
#pragma once

namespace FA_NAMESPACE {

static constexpr int64_t kPartTokens = 16;
// Key dimensions that are processed at a time within a part: as many vectors as registers hold.
static constexpr int64_t kPartVectors = 4, kPartColumns = kPartVectors * Vec::kWidth;
static constexpr int64_t kPartTileRows = (kPartTokens + kRows - 1) / kRows * kRows;

// The offsets of the buffers of a chunk, in floats from the beginning of the working memory.
template <class Unit>
struct LinearLayout {
    // Scores form a triangle. It is computed in steps of this many rows, each step up to its diagonal.
    static constexpr int64_t kDepthStep = Unit::kElements * Unit::kDepthStep;
    static constexpr int64_t kStepRows = common_multiple(Unit::kRowStep, kDepthStep);
    static constexpr bool kPairs = Unit::kElements == 2;
    static_assert(Unit::kElements <= 2);

    int64_t chunk;
    int64_t key_columns;  // headdim_k, padded to a multiple of kPartColumns
    int64_t key_depth, key_rows;  // headdim_k, padded as the depth of a product and as the rows of its result
    int64_t key_stride, value_stride;
    int64_t state_floats;
    int64_t keys, asking, queries, keys_t, scores, query_scores, held, values, states, gates, row, left, right, total;

    LinearLayout(const FaLinearParams& p, int64_t num_columns, int64_t num_heads) : chunk(p.chunk) {
        key_columns = round_up(p.headdim_k, kPartColumns);
        key_depth = round_up(p.headdim_k, kDepthStep);
        key_rows = round_up(key_depth, Unit::kRowStep);
        key_stride = key_columns + kRowPadding;
        value_stride = round_up(num_columns, Vec::kWidth) + (num_columns > kPanel ? kRowPadding : 0);
        int64_t at = 0;
        const auto take = [&](int64_t floats) {
            const int64_t here = at;
            at += round_up(floats, kRowPadding);
            return here;
        };
        const int64_t tokens = 2 * chunk;  // asking keys, then queries, as rows of one matrix
        // Gates of key dimensions are multiplied into keys and into asking keys, each in its own way.
        const bool copies_keys = p.gate_per_key && p.overwrites;
        // A tile of rows may extend past the last token.
        keys = take((tokens + (copies_keys ? chunk : 0) + kPartTileRows) * key_stride);
        asking = keys + (copies_keys ? chunk : 0) * key_stride;
        queries = asking + chunk * key_stride;
        keys_t = take(larger(key_rows, key_columns) * chunk);
        scores = take((chunk + kPartTileRows) * chunk);
        query_scores = take((chunk + kPartTileRows) * chunk);
        held = take((tokens + kPartTileRows) * value_stride);
        values = take((chunk + FloatUnit::kRowStep) * value_stride);
        state_floats = key_rows * value_stride;
        states = take(num_heads * state_floats);
        gates = take(chunk * (p.gate_per_key ? key_stride : 1));
        row = take(larger(2 * chunk, (1 + chunk / kPartTokens) * key_columns + kPartTileRows * key_stride));
        left = take(kPairs ? larger(tokens * (key_stride / 2 + kRowPadding), key_rows * (chunk / 2 + kRowPadding)) : 0);
        right = take(kPairs ? larger(key_rows, chunk) / 2 * larger(value_stride, chunk) : 0);
        total = at;
    }
};

// One operand of a matrix product, in units.
struct Operand {
    const float* at;
    int64_t stride;
};

template <class Element, class Unit>
class LinearChunks {
    using Layout = LinearLayout<Unit>;

public:
    LinearChunks(const FaLinearParams& p, const LinearTask& task, float* scratch)
        : p_(p),
          task_(task),
          tokens_{p, task},
          l_(p, task.num_columns, task.num_heads),
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
          row_(scratch + l_.row),
          left_(scratch + l_.left),
          right_(scratch + l_.right) {}

    void run() {
        memset(states_, 0, task_.num_heads * l_.state_floats * sizeof(float));
        for (int64_t h = 0; h < task_.num_heads; ++h) {
            begin_head(h);
            for (int64_t d = 0; p_.initial_state && d < p_.headdim_k; ++d)
                widen_row(tokens_.initial_state(d), state_ + d * l_.value_stride, task_.num_columns, task_.num_columns);
        }
        // Rows after the last token are multiplied too, so they must be finite.
        memset(keys_, 0, (l_.keys_t - l_.keys) * sizeof(float));
        memset(keys_t_, 0, (l_.scores - l_.keys_t) * sizeof(float));
        memset(scores_, 0, (l_.held - l_.scores) * sizeof(float));
        Unit{}.begin();
        // Heads take turns with a chunk: their rows of a token are adjacent and share pages of memory.
        for (int64_t first = 0; first < task_.num_tokens; first += l_.chunk) {
            const int64_t n = smaller(l_.chunk, task_.num_tokens - first);
            for (int64_t h = 0; h < task_.num_heads; ++h) {
                begin_head(h);
                load(first, n);
                prefetch_next(first, h);
                p_.gate_per_key ? run_key_gates() : run_head_gates();
                for (int64_t i = 0; i < n; ++i) tokens_.write(first + i, held_queries() + i * l_.value_stride);
            }
        }
        Unit{}.end();
        for (int64_t h = 0; p_.final_state && h < task_.num_heads; ++h) {
            begin_head(h);
            for (int64_t d = 0; d < p_.headdim_k; ++d)
                narrow_row(state_ + d * l_.value_stride, tokens_.final_state(d), task_.num_columns);
        }
    }

private:
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

    // Tokens past the end of the sequence are zeros with gates of 1, which leave the state unchanged.
    void load(int64_t first, int64_t n) {
        first_ = first;
        n_ = n;
        for (int64_t i = 0; i < n; ++i) {
            tokens_.key(first + i, keys_ + i * l_.key_stride, l_.key_columns);
            tokens_.query(first + i, queries_ + i * l_.key_stride, l_.key_columns);
            tokens_.value(first + i, values_ + i * l_.value_stride, columns_);
            if (p_.gate_per_key) {
                tokens_.gates(first + i, gates_ + i * l_.key_stride, l_.key_columns);
            } else {
                gates_[i] = tokens_.gate(first + i);
            }
        }
        for (int64_t i = n; i < l_.chunk; ++i) {
            memset(keys_ + i * l_.key_stride, 0, l_.key_columns * sizeof(float));
            memset(queries_ + i * l_.key_stride, 0, l_.key_columns * sizeof(float));
            memset(values_ + i * l_.value_stride, 0, columns_ * sizeof(float));
            for (int64_t d = 0; d < (p_.gate_per_key ? l_.key_columns : 1); ++d)
                gates_[i * (p_.gate_per_key ? l_.key_stride : 1) + d] = 1.0f;
        }
    }

    void run_head_gates() {
        transpose_units(keys_, l_.key_stride, keys_t_, l_.chunk, l_.chunk, round_up(p_.headdim_k, Vec::kWidth));
        const Operand tokens = left(first_asking(), l_.key_stride, num_asking(), l_.key_depth);
        const Operand keys = right(keys_t_, l_.chunk, l_.key_depth, l_.chunk);
        for (int64_t chunk = 0; chunk < num_asking(); chunk += l_.chunk) {
            float* scores = chunk + l_.chunk < num_asking() ? scores_ : query_scores_;
            for (int64_t i = 0; i < l_.chunk; i += Layout::kStepRows)
                multiply<false>(row_of(tokens, chunk + i), keys, l_.key_depth, scores + i * l_.chunk, l_.chunk,
                                Layout::kStepRows, smaller(round_up(i + Layout::kStepRows, Vec::kWidth), l_.chunk));
        }
        ask_state(tokens);
        float* const weights = row_;  // weights[j]: the product of the gates after token j up to token i
        float* const since = row_ + l_.chunk;  // products of gates since the beginning of the chunk
        memset(weights, 0, l_.chunk * sizeof(float));
        float all = 1.0f;
        for (int64_t i = 0; i < l_.chunk; ++i) {
            since[i] = all *= gates_[i];
            for (int64_t j = 0; j < i; j += Vec::kWidth) store(weights + j, load_of(weights + j) * broadcast(gates_[i]));
            weights[i] = 1.0f;
            weigh(i, query_scores_ + i * l_.chunk, weights, 1.0f);
            if (is_delta()) weigh_system(i, weights, since[i]);
        }
        if (is_delta()) solve();
        scale_rows(held_queries(), since);
        add_values();
        // The weights for the last token are the factors of the values in the state.
        scale_rows(values_, weights);
        for (int64_t d = 0; d < p_.headdim_k; ++d) scale_row(state_ + d * l_.value_stride, broadcast(all));
        add_to_state();
    }

    // The rows that are multiplied with keys and with the state: asking keys of the delta rule, then queries.
    int64_t num_asking() const { return is_delta() ? 2 * l_.chunk : l_.chunk; }
    const float* first_asking() const { return is_delta() ? asking_ : queries_; }

    // Multiplies these rows with the state before the chunk.
    void ask_state(Operand rows) const {
        multiply<false>(rows, right(state_, l_.value_stride, l_.key_depth, columns_), l_.key_depth,
                        is_delta() ? held_ : held_queries(), l_.value_stride, num_asking(), columns_);
    }

    // Make operand A from `rows` rows of floats, and operand B from `depth` rows: in place, or in pairs of bfloat16.
    Operand left(const float* from, int64_t stride, int64_t rows, int64_t depth) const {
        if constexpr (!Layout::kPairs) return {from, stride};
        const int64_t units = depth / 2 + kRowPadding;
        for (int64_t i = 0; i < rows; ++i)
            narrow_row(from + i * stride, reinterpret_cast<Bfloat16*>(left_ + i * units), depth);
        return {left_, units};
    }
    Operand right(const float* from, int64_t stride, int64_t depth, int64_t columns) const {
        if constexpr (Layout::kPairs) {
            for (int64_t i = 0; i < depth; i += 2)
                for (int64_t c = 0; c < columns; c += Vec::kWidth)
                    store(right_ + i / 2 * stride + c,
                          Unit{}.pack(load_of(from + i * stride + c), load_of(from + (i + 1) * stride + c)));
            return {right_, stride};
        }
        return {from, stride};
    }
    static Operand row_of(Operand a, int64_t row) { return {a.at + row * a.stride, a.stride}; }

    // result (rows, columns) = or += a (rows, depth) b (depth, columns)
    template <bool kAccumulate, class SomeUnit = Unit>
    static void multiply(Operand a, Operand b, int64_t depth, float* result, int64_t stride, int64_t rows, int64_t columns) {
        for (int64_t j = 0; j < columns; j += kPanel)
            multiply_panel<kAccumulate>(SomeUnit{}, a.at, a.stride, b.at + j, b.stride, depth / SomeUnit::kElements,
                                        result + j, stride, rows, smaller(kPanel, columns - j));
    }

    static Vec load_of(const float* from) { return FA_NAMESPACE::load(from); }

    // Weighs the scores of token i with the tokens up to it; scores with later tokens become 0.
    void weigh(int64_t i, float* scores, const float* weights, float factor) const {
        for (int64_t j = 0; j <= i; j += Vec::kWidth)
            store(scores + j, load_of(scores + j) * load_of(weights + j) * broadcast(factor));
        for (int64_t j = i + 1; j < l_.chunk; ++j) scores[j] = 0.0f;
    }

    // Computes row i of the triangular system and of its right side: beta * (v - what the state holds for the key).
    void weigh_system(int64_t i, const float* weights, float since) {
        const float beta = i < n_ ? tokens_.beta(first_ + i) : 0.0f;
        float* system = scores_ + i * l_.chunk;
        weigh(i, system, weights, -beta);
        float* value = values_ + i * l_.value_stride;
        const float* held = held_ + i * l_.value_stride;
        for (int64_t c = 0; c < columns_; c += Vec::kWidth)
            store(value + c, broadcast(beta) * (load_of(value + c) - broadcast(since) * load_of(held + c)));
    }

    // Solves u_i = right_i + sum_{j<i} system_ij u_j in place of the values. The rows of a tile first add all earlier tiles
    // in one product, then are solved in order. The last tile may write rows after the chunk, which are not read.
    void solve() {
        for (int64_t first = 0; first < l_.chunk; first += FloatUnit::kRowStep) {
            const float* system = scores_ + first * l_.chunk;
            float* rows = values_ + first * l_.value_stride;
            if (first > 0)
                multiply<true, FloatUnit>({system, l_.chunk}, {values_, l_.value_stride}, first, rows, l_.value_stride,
                                          FloatUnit::kRowStep, columns_);
            for (int64_t c = 0; c < columns_; c += Vec::kWidth) {
                Vec u[FloatUnit::kRowStep];
#pragma GCC unroll 16
                for (int i = 0; i < FloatUnit::kRowStep; ++i) {
                    u[i] = load_of(rows + i * l_.value_stride + c);
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
            multiply<true>(row_of(scores, i), values, smaller(i + Layout::kStepRows, l_.chunk),
                           held_queries() + i * l_.value_stride, l_.value_stride, Layout::kStepRows, columns_);
    }

    void add_to_state() {
        multiply<true>(left(keys_t_, l_.chunk, l_.key_rows, l_.chunk), right(values_, l_.value_stride, l_.chunk, columns_),
                       l_.chunk, state_, l_.value_stride, l_.key_rows, columns_);
    }

    void scale_row(float* row, Vec factor) const {
        for (int64_t c = 0; c < columns_; c += Vec::kWidth) store(row + c, load_of(row + c) * factor);
    }
    void scale_rows(float* rows, const float* factors) const {
        for (int64_t i = 0; i < l_.chunk; ++i) scale_row(rows + i * l_.value_stride, broadcast(factors[i]));
    }

    void run_key_gates() {
        if (is_delta()) memcpy(asking_, keys_, l_.chunk * l_.key_stride * sizeof(float));
        float* const part_gates = row_ + l_.key_columns;  // the product of the gates of each part
        for (int64_t first = 0; first < l_.chunk; first += kPartTokens) {
            if (is_delta()) score_part(first, asking_, scores_);
            score_part(first, queries_, query_scores_);
            carry_keys(first, part_gates + first / kPartTokens * l_.key_columns);
        }
        if (is_delta()) score_parts(asking_, scores_, part_gates);
        score_parts(queries_, query_scores_, part_gates);
        ask_state(left(first_asking(), l_.key_stride, num_asking(), l_.key_depth));
        if (is_delta()) {
            float* const ones = room_for_rows();
            for (int64_t j = 0; j < l_.chunk; j += Vec::kWidth) store(ones + j, broadcast(1.0f));
            for (int64_t i = 0; i < l_.chunk; ++i) weigh_system(i, ones, 1.0f);
            solve();
        }
        add_values();
        carry_keys_to_end(part_gates);
        for (int64_t d = 0; d < p_.headdim_k; ++d) scale_row(state_ + d * l_.value_stride, broadcast(row_[d]));
        add_to_state();
    }

    // Rows of a part, after the gates.
    float* room_for_rows() const { return row_ + (1 + l_.chunk / kPartTokens) * l_.key_columns; }

    // Computes the scores of rows with tokens of parts before theirs, and multiplies the rows by all gates up to theirs.
    // row_: set to the product of the gates of the chunk.
    void score_parts(float* rows, float* scores, const float* part_gates) {
        float* const all = row_;  // the product of all gates before the current part
        for (int64_t d = 0; d < l_.key_columns; d += Vec::kWidth) store(all + d, broadcast(1.0f));
        for (int64_t part = 0; part < l_.chunk / kPartTokens; ++part) {
            const int64_t first = part * kPartTokens;
            score_parts_before(part, rows, scores, part_gates);
            for (int64_t i = first; i < first + kPartTokens; ++i) multiply_key_row(rows + i * l_.key_stride, all);
            multiply_key_row(all, part_gates + part * l_.key_columns);
        }
    }

    void multiply_key_row(float* row, const float* factors) const {
        for (int64_t d = 0; d < l_.key_columns; d += Vec::kWidth) store(row + d, load_of(row + d) * load_of(factors + d));
    }

    // Computes the scores among the tokens of a part, and multiplies the asking rows by the gates of the part up to theirs.
    void score_part(int64_t first, float* rows, float* scores) {
        for (int64_t i = first; i < first + kPartTokens; ++i) {
            Vec sums[kPartTokens];
            for (Vec& sum : sums) sum = zero();
            for (int64_t d = 0; d < l_.key_columns; d += kPartColumns) {
                float* query = rows + i * l_.key_stride + d;
                Vec carried[kPartVectors];
                for (int64_t c = 0; c < kPartVectors; ++c) carried[c] = load_of(query + c * Vec::kWidth);
                for (int64_t j = i; j >= first; --j) {
                    const float *key = keys_ + j * l_.key_stride + d, *gate = gates_ + j * l_.key_stride + d;
#pragma GCC unroll 4
                    for (int64_t c = 0; c < kPartVectors; ++c) {
                        sums[j - first] = fma(carried[c], load_of(key + c * Vec::kWidth), sums[j - first]);
                        carried[c] = carried[c] * load_of(gate + c * Vec::kWidth);
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
                store(key, load_of(key) * after);
                after = after * load_of(gates_ + j * l_.key_stride + d);
            }
            store(gates_of_part + d, after);
        }
        transpose_units(keys_ + first * l_.key_stride, l_.key_stride, keys_t_ + first, l_.chunk, kPartTokens,
                        round_up(p_.headdim_k, Vec::kWidth));
    }

    // Computes the scores of the tokens of a part with tokens of earlier parts. Whole tiles of rows are multiplied: scores
    // of the next part that this writes are overwritten later.
    void score_parts_before(int64_t part, const float* asking, float* scores, const float* part_gates) {
        const int64_t first = part * kPartTokens;
        float* const rows = room_for_rows();
        for (int64_t i = 0; i < kPartTileRows; ++i)
            memcpy(rows + i * l_.key_stride, asking + (first + i) * l_.key_stride, l_.key_columns * sizeof(float));
        for (int64_t other = part - 1; other >= 0; --other) {
            for (int64_t i = 0; other < part - 1 && i < kPartTokens; ++i)
                multiply_key_row(rows + i * l_.key_stride, part_gates + (other + 1) * l_.key_columns);
            const int64_t column = other * kPartTokens;
            multiply<false, FloatUnit>({rows, l_.key_stride}, {keys_t_ + column, l_.chunk}, p_.headdim_k,
                                       scores + first * l_.chunk + column, l_.chunk, kPartTileRows, kPartTokens);
        }
    }

    // Multiplies the keys of each part by the gates of the later parts.
    void carry_keys_to_end(const float* part_gates) {
        for (int64_t d = 0; d < p_.headdim_k; ++d) {
            float after = 1.0f;
            for (int64_t part = l_.chunk / kPartTokens - 1; part >= 0; --part) {
                float* keys = keys_t_ + d * l_.chunk + part * kPartTokens;
                for (int64_t j = 0; j < kPartTokens; j += Vec::kWidth) store(keys + j, load_of(keys + j) * broadcast(after));
                after *= part_gates[part * l_.key_columns + d];
            }
        }
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
    float* const row_;
    float* const left_;
    float* const right_;
    float* state_ = nullptr;  // the state of the current head
    int64_t first_ = 0, n_ = 0;
};

}  // namespace FA_NAMESPACE
