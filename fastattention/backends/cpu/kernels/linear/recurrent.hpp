// Linear attention token by token. Each token reads the rows of the state once, or twice with the delta rule.
#pragma once

namespace FA_NAMESPACE {

template <class Element>
class LinearSteps {
public:
    LinearSteps(const FaLinearParams& p, const LinearTask& task, float* scratch)
        : p_(p),
          task_(task),
          tokens_{p, task},
          columns_(round_up(task.num_columns, Vec::kWidth)),
          key_columns_(round_up(p.headdim_k, Vec::kWidth)),
          query_(scratch),
          key_(query_ + key_columns_),
          gates_(key_ + key_columns_),
          value_(gates_ + key_columns_),
          out_(value_ + columns_),
          state_(out_ + columns_) {}

    static int64_t scratch_floats(const FaLinearParams& p, int64_t num_columns) {
        const int64_t columns = round_up(num_columns, Vec::kWidth);
        return 3 * round_up(p.headdim_k, Vec::kWidth) + 2 * columns + p.headdim_k * columns;
    }

    void run() {
        for (int64_t h = 0; h < task_.num_heads; ++h) {
            tokens_.head = task_.head + h;
            run_head();
        }
    }

private:
    // Rows that are processed together; the factors of more rows would not fit registers.
    static constexpr int kRows = 4;

    struct State {
        const float* from;
        int64_t from_stride;
        float* to;
        int64_t to_stride;
    };

    void run_head() {
        // The first token reads the initial state in place, and the last token writes the final state in place.
        State state{tokens_.initial_state(0), p_.state_stride_row, state_, columns_};
        if (state.from == nullptr) {
            memset(state_, 0, p_.headdim_k * columns_ * sizeof(float));
            state.from = state_;
            state.from_stride = columns_;
        }
        for (int64_t token = 0; token < task_.num_tokens; ++token) {
            load(token);
            if (token + 1 == task_.num_tokens && p_.final_state) {
                state.to = tokens_.final_state(0);
                state.to_stride = p_.headdim_v;
            }
            if (p_.overwrites) find_rest(state, tokens_.beta(token));
            update(state);
            tokens_.write(token, out_);
            state.from = state.to;
            state.from_stride = state.to_stride;
        }
        if (task_.num_tokens == 0 && p_.final_state) copy(state);
    }

    void load(int64_t token) {
        tokens_.query(token, query_, key_columns_);
        tokens_.key(token, key_, key_columns_);
        tokens_.value(token, value_, columns_);
        if (p_.gate_per_key) return tokens_.gates(token, gates_, key_columns_);
        const Vec gate = broadcast(tokens_.gate(token));
        for (int64_t d = 0; d < key_columns_; d += Vec::kWidth) store(gates_ + d, gate);
    }

    // Delta rule: replaces the value by beta * (value - what the state holds for the key).
    void find_rest(const State& state, float beta) {
        float* const held = out_;
        memset(held, 0, columns_ * sizeof(float));
        int64_t d = 0;
        for (; d + kRows <= p_.headdim_k; d += kRows) ask_rows<kRows>(state, d, held);
        for (; d < p_.headdim_k; ++d) ask_rows<1>(state, d, held);
        for (int64_t c = 0; c < columns_; c += Vec::kWidth)
            store(value_ + c, broadcast(beta) * (FA_NAMESPACE::load(value_ + c) - FA_NAMESPACE::load(held + c)));
    }

    void update(const State& state) {
        memset(out_, 0, columns_ * sizeof(float));
        int64_t d = 0;
        for (; d + kRows <= p_.headdim_k; d += kRows) update_rows<kRows>(state, d);
        for (; d < p_.headdim_k; ++d) update_rows<1>(state, d);
    }

    template <int kCount>
    void ask_rows(const State& state, int64_t d, float* held) const {
        const float* const from = state.from + d * state.from_stride;
        Vec keys[kCount];
        for (int r = 0; r < kCount; ++r) keys[r] = broadcast(gates_[d + r] * key_[d + r]);
        for_each_vector([&](int64_t c, auto vector) __attribute__((always_inline)) {
            Vec sum = FA_NAMESPACE::load(held + c);
#pragma GCC unroll 4
            for (int r = 0; r < kCount; ++r) sum = fma(keys[r], vector.load(from + r * state.from_stride + c), sum);
            store(held + c, sum);
        });
    }

    template <int kCount>
    void update_rows(const State& state, int64_t d) {
        const float* const from = state.from + d * state.from_stride;
        float* const to = state.to + d * state.to_stride;
        Vec gates[kCount], keys[kCount], queries[kCount];
        for (int r = 0; r < kCount; ++r) {
            gates[r] = broadcast(gates_[d + r]);
            keys[r] = broadcast(key_[d + r]);
            queries[r] = broadcast(query_[d + r]);
        }
        for_each_vector([&](int64_t c, auto vector) __attribute__((always_inline)) {
            const Vec added = FA_NAMESPACE::load(value_ + c);
            Vec out = FA_NAMESPACE::load(out_ + c);
#pragma GCC unroll 4
            for (int r = 0; r < kCount; ++r) {
                const Vec row = fma(keys[r], added, gates[r] * vector.load(from + r * state.from_stride + c));
                out = fma(queries[r], row, out);
                vector.store(to + r * state.to_stride + c, row);
            }
            store(out_ + c, out);
        });
    }

    // Calls visit(first column, vector) for all columns of the task.
    template <class Visit>
    __attribute__((always_inline)) void for_each_vector(Visit visit) const {
        int64_t c = 0;
        for (; c + Vec::kWidth <= task_.num_columns; c += Vec::kWidth) visit(c, WholeVector{});
        if (c < task_.num_columns) visit(c, PartOfVector{static_cast<int>(task_.num_columns - c)});
    }

    void copy(const State& state) const {
        for (int64_t d = 0; d < p_.headdim_k; ++d)
            memcpy(tokens_.final_state(d), state.from + d * state.from_stride, task_.num_columns * sizeof(float));
    }

    const FaLinearParams& p_;
    const LinearTask& task_;
    LinearTokens<Element> tokens_;
    const int64_t columns_, key_columns_;
    float *const query_, *const key_, *const gates_, *const value_, *const out_, *const state_;
};

}  // namespace FA_NAMESPACE
