// Reads and writes the tokens of a task of linear attention; fastattention/linear/reference.py has the formulas.
#pragma once

namespace FA_NAMESPACE {

static constexpr int64_t kMostColumns = 256;  // of values; MAX_HEADDIM in fastattention/linear/validation.py
static constexpr float kL2NormEpsilon = 1e-6f;  // as in fastattention/linear/reference.py

FA_INLINE float float_of(const void* from, int64_t dtype, int64_t at) {
    float value;
    widen_any(from, dtype, at, &value, 1, 1);
    return value;
}

// Flushes denormals to zero while it exists: products of strong gates become denormal, and some processors take a hundred
// cycles for each operation on them.
struct FlushDenormals {
#if defined(__SSE2__)
    static constexpr unsigned kFlushes = 0x8040;  // flushes results and operands, in MXCSR
    const unsigned before = __builtin_ia32_stmxcsr();
    FlushDenormals() { __builtin_ia32_ldmxcsr(before | kFlushes); }
    ~FlushDenormals() { __builtin_ia32_ldmxcsr(before); }
#elif defined(__aarch64__)
    static constexpr uint64_t kFlushes = 1 << 24;  // FPCR.FZ
    uint64_t before;
    FlushDenormals() {
        __asm__ volatile("mrs %0, fpcr" : "=r"(before));
        __asm__ volatile("msr fpcr, %0" : : "r"(before | kFlushes));
    }
    ~FlushDenormals() { __asm__ volatile("msr fpcr, %0" : : "r"(before)); }
#else
    FlushDenormals() {}
    ~FlushDenormals() {}
#endif
    FlushDenormals(const FlushDenormals&) = delete;
    FlushDenormals& operator=(const FlushDenormals&) = delete;
};

// The tokens of a sequence, of one head at a time.
template <class Element>
struct LinearTokens {
    const FaLinearParams& p;
    const LinearTask& task;
    int64_t head = task.head;

    // These read a row as floats and pad it with zeros up to `padded`.
    void query(int64_t token, float* to, int64_t padded) const {
        load_row(key_row(p.q, p.q_stride_batch, p.q_stride_row, p.q_stride_head, token), to, padded,
                 static_cast<float>(p.scale));
    }
    void key(int64_t token, float* to, int64_t padded) const {
        load_row(key_row(p.k, p.k_stride_batch, p.k_stride_row, p.k_stride_head, token), to, padded, 1.0f);
    }
    // Rows as they are given, padded with zeros.
    void query_as_given(int64_t token, float* to, int64_t padded) const {
        widen_row(key_row(p.q, p.q_stride_batch, p.q_stride_row, p.q_stride_head, token), to, p.headdim_k, padded);
    }
    void key_as_given(int64_t token, float* to, int64_t padded) const {
        widen_row(key_row(p.k, p.k_stride_batch, p.k_stride_row, p.k_stride_head, token), to, p.headdim_k, padded);
    }
    void value_as_given(int64_t token, float* to, int64_t padded) const {
        widen_row(value_row(token), to, task.num_columns, padded);
    }
    // The value; times beta, unless the delta rule multiplies by beta later.
    void value(int64_t token, float* to, int64_t padded) const {
        value_as_given(token, to, padded);
        if (p.beta == nullptr || p.overwrites) return;
        const Vec factor = broadcast(beta(token));
        for (int64_t c = 0; c < padded; c += Vec::kWidth) store(to + c, load(to + c) * factor);
    }
    // The gate of the head, if it has one for all key dimensions.
    float gate(int64_t token) const { return exp(float_of(p.g, p.gate_dtype, gate_at(token))); }
    // The gates of all key dimensions, padded with ones.
    void gates(int64_t token, float* to, int64_t padded) const {
        widen_any(p.g, p.gate_dtype, gate_at(token), to, p.headdim_k, padded);
        for (int64_t d = 0; d < padded; d += Vec::kWidth) store(to + d, exp(load(to + d)));
    }
    float beta(int64_t token) const {
        return float_of(
            p.beta, p.beta_dtype,
            task.batch * p.beta_stride_batch + (task.first_token + token) * p.beta_stride_row + head * p.beta_stride_head);
    }
    // Adds what skips the state to a row of results, whole vectors of it, and writes it.
    void write(int64_t token, float* from) const {
        if (p.skip) {
            alignas(64) float value[kMostColumns];
            value_as_given(token, value, round_up(task.num_columns, Vec::kWidth));
            for (int64_t c = 0; c < task.num_columns; c += Vec::kWidth)
                store(from + c, fma(broadcast(p.skip[head]), load(value + c), load(from + c)));
        }
        narrow_row(from, out_row(token), task.num_columns);
    }

    // Prefetches the rows of a token of a head. Tokens are far apart, so hardware does not prefetch them in time. Inline,
    // because GCC drops the call of a function that only prefetches, as if it had no effect.
    __attribute__((always_inline)) void prefetch_token(int64_t token, int64_t of_head) const {
        LinearTokens other = *this;
        other.head = of_head;
        const int64_t key_bytes = p.headdim_k * sizeof(Element), value_bytes = task.num_columns * sizeof(Element);
        prefetch_bytes(other.key_row(p.q, p.q_stride_batch, p.q_stride_row, p.q_stride_head, token), key_bytes);
        prefetch_bytes(other.key_row(p.k, p.k_stride_batch, p.k_stride_row, p.k_stride_head, token), key_bytes);
        prefetch_bytes(other.value_row(token), value_bytes);
        prefetch_bytes(other.out_row(token), value_bytes);
        if (!p.gate_per_key) return;
        const int64_t gate_size = p.gate_dtype == FA_FLOAT32 ? 4 : 2;
        prefetch_bytes(static_cast<const char*>(p.g) + other.gate_at(token) * gate_size, p.headdim_k * gate_size);
    }

    // Row d of the state before the first token (null: zeros) and after the last (null: not returned).
    const float* initial_state(int64_t d) const {
        if (p.initial_state == nullptr) return nullptr;
        return p.initial_state + task.sequence * p.state_stride_sequence + head * p.state_stride_head +
               d * p.state_stride_row + task.first_column;
    }
    float* final_state(int64_t d) const {
        if (p.final_state == nullptr) return nullptr;
        return p.final_state + ((task.sequence * p.nheads + head) * p.headdim_k + d) * p.headdim_v + task.first_column;
    }

private:
    int64_t gate_at(int64_t token) const {
        return task.batch * p.g_stride_batch + (task.first_token + token) * p.g_stride_row + head * p.g_stride_head;
    }

    const Element* key_row(const void* base, int64_t stride_batch, int64_t stride_row, int64_t stride_head,
                           int64_t token) const {
        return static_cast<const Element*>(base) + task.batch * stride_batch + (task.first_token + token) * stride_row +
               head / (p.nheads / p.nheads_k) * stride_head;
    }
    const Element* value_row(int64_t token) const {
        return static_cast<const Element*>(p.v) + task.batch * p.v_stride_batch +
               (task.first_token + token) * p.v_stride_row + head * p.v_stride_head + task.first_column;
    }
    Element* out_row(int64_t token) const {
        const int64_t row = (task.batch * p.seqlen + task.first_token + token) * p.nheads + head;
        return static_cast<Element*>(p.out) + row * p.headdim_v + task.first_column;
    }

    void load_row(const Element* from, float* to, int64_t padded, float factor) const {
        widen_row(from, to, p.headdim_k, padded);
        if (p.l2norm) {
            Vec sum = zero();
            for (int64_t d = 0; d < padded; d += Vec::kWidth) sum = fma(load(to + d), load(to + d), sum);
            factor /= __builtin_sqrtf(reduce_add(sum) + kL2NormEpsilon);
        }
        if (factor != 1.0f)
            for (int64_t d = 0; d < padded; d += Vec::kWidth) store(to + d, load(to + d) * broadcast(factor));
    }
};

}  // namespace FA_NAMESPACE
