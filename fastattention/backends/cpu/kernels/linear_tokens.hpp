// Linear attention token by token: some columns of the state, which are read and written once where there is one token.
#pragma once

namespace FA_NAMESPACE {

// Rows of kUsed vectors of a state. The last vector may be used in part.
template <int kUsed>
struct StateColumns {
    int used_of_last;

    // from: null for zeros
    __attribute__((always_inline)) void load(const float* from, Vec* to) const {
#pragma GCC unroll 4
        for (int c = 0; c < kUsed; ++c) {
            if (from == nullptr) {
                to[c] = zero();
            } else if (c + 1 < kUsed || used_of_last == Vec::kWidth) {
                to[c] = FA_NAMESPACE::load(from + c * Vec::kWidth);
            } else {
                to[c] = load_partial(from + c * Vec::kWidth, used_of_last);
            }
        }
    }
    __attribute__((always_inline)) void store(float* to, const Vec* from) const {
#pragma GCC unroll 4
        for (int c = 0; c + 1 < kUsed; ++c) FA_NAMESPACE::store(to + c * Vec::kWidth, from[c]);
        float* last = to + (kUsed - 1) * Vec::kWidth;
        if (used_of_last == Vec::kWidth) return FA_NAMESPACE::store(last, from[kUsed - 1]);
        store_partial(last, from[kUsed - 1], used_of_last);
    }
};

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
    static constexpr int64_t kStepVectors = 4;

    struct Place {
        const float* at;  // null for zeros
        int64_t stride;
    };

    void run_head() {
        // The first token reads the state that was given, and the last writes the one asked for.
        Place from{tokens_.initial_state(0), p_.state_stride_row};
        for (int64_t token = 0; token < task_.num_tokens; ++token) {
            load(token);
            const bool writes = token + 1 == task_.num_tokens && p_.final_state;
            float* to = writes ? tokens_.final_state(0) : state_;
            const int64_t to_stride = writes ? p_.headdim_v : columns_;
            const float beta = p_.beta ? tokens_.beta(token) : 0.0f;
            for (int64_t c = 0; c < columns_; c += kStepVectors * Vec::kWidth) step(beta, from, to, to_stride, c);
            tokens_.write(token, out_);
            from = {to, to_stride};
        }
        if (task_.num_tokens == 0 && p_.final_state) copy_state();
    }

    void load(int64_t token) {
        tokens_.query(token, query_, key_columns_);
        tokens_.key(token, key_, key_columns_);
        tokens_.value(token, value_, columns_);
        if (p_.gate_per_key) return tokens_.gates(token, gates_, key_columns_);
        const Vec gate = broadcast(tokens_.gate(token));
        for (int64_t d = 0; d < key_columns_; d += Vec::kWidth) store(gates_ + d, gate);
    }

    void step(float beta, Place from, float* to, int64_t to_stride, int64_t column) {
        switch (smaller(kStepVectors, (columns_ - column) / Vec::kWidth)) {
            case 1: return step_columns<1>(beta, from, to, to_stride, column);
            case 2: return step_columns<2>(beta, from, to, to_stride, column);
            case 3: return step_columns<3>(beta, from, to, to_stride, column);
            default: return step_columns<4>(beta, from, to, to_stride, column);
        }
    }

    template <int kUsed>
    void step_columns(float beta, Place from, float* to, int64_t to_stride, int64_t column) {
        const int64_t used = smaller(Vec::kWidth, task_.num_columns - column - (kUsed - 1) * Vec::kWidth);
        const StateColumns<kUsed> columns{static_cast<int>(used)};
        const auto row_from = [&](int64_t d) { return from.at ? from.at + d * from.stride + column : nullptr; };
        Vec added[kUsed], out[kUsed], row[kUsed];
        for (int c = 0; c < kUsed; ++c) added[c] = FA_NAMESPACE::load(value_ + column + c * Vec::kWidth);
        if (p_.beta) {
            Vec held[kUsed];
            for (int c = 0; c < kUsed; ++c) held[c] = zero();
            for (int64_t d = 0; from.at && d < p_.headdim_k; ++d) {
                columns.load(row_from(d), row);
                const Vec key = broadcast(gates_[d] * key_[d]);
#pragma GCC unroll 4
                for (int c = 0; c < kUsed; ++c) held[c] = fma(key, row[c], held[c]);
            }
            for (int c = 0; c < kUsed; ++c) added[c] = broadcast(beta) * (added[c] - held[c]);
        }
        for (int c = 0; c < kUsed; ++c) out[c] = zero();
        for (int64_t d = 0; d < p_.headdim_k; ++d) {
            columns.load(row_from(d), row);
            const Vec gate = broadcast(gates_[d]), key = broadcast(key_[d]), query = broadcast(query_[d]);
#pragma GCC unroll 4
            for (int c = 0; c < kUsed; ++c) {
                row[c] = fma(key, added[c], gate * row[c]);
                out[c] = fma(query, row[c], out[c]);
            }
            columns.store(to + d * to_stride + column, row);
        }
        for (int c = 0; c < kUsed; ++c) FA_NAMESPACE::store(out_ + column + c * Vec::kWidth, out[c]);
    }

    void copy_state() const {
        for (int64_t d = 0; d < p_.headdim_k; ++d) {
            if (p_.initial_state) {
                memcpy(tokens_.final_state(d), tokens_.initial_state(d), task_.num_columns * sizeof(float));
            } else {
                memset(tokens_.final_state(d), 0, task_.num_columns * sizeof(float));
            }
        }
    }

    const FaLinearParams& p_;
    const LinearTask& task_;
    LinearTokens<Element> tokens_;
    const int64_t columns_, key_columns_;
    float *const query_, *const key_, *const gates_, *const value_, *const out_, *const state_;
};

}  // namespace FA_NAMESPACE
