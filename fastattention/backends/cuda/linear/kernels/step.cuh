// Linear attention token by token, for decoding; fastattention/linear/reference.py has the formulas. A state is read once,
// stays in registers for all tokens of its sequence, and is written once.
//
// Columns of a state (headdim_k rows, headdim_v columns) do not depend on each other, so CTAs divide the columns of a head.
// Warps of a CTA divide the rows. With S the state times the gates of a token, and w what the token adds along its key,
// out = (S + k w^T)^T q = S^T q + (q . k) w. Both products, S^T k for w and S^T q, then read S, so a token needs one round
// of sums over rows. It includes the squares of q and k for l2norm.
#pragma once

#include "columns.cuh"
#include "gates.cuh"
#include "row_sums.cuh"
#include "step_params.h"

namespace fastattention {

constexpr int kStepWarps = Config::num_warps;  // per CTA
// Warps for which a multiprocessor has registers. With 16 of them 128 states of 128 x 128 are one wave on an H100's 132
// multiprocessors. Floats as inputs take more registers.
constexpr int kStepWarpsOfSm = Config::float32 ? 12 : 16;
constexpr int kStepColumns = Config::columns;
constexpr int kLanesOfRow = kStepColumns / 4;
constexpr int kWarpRows = Config::warp_rows;
constexpr int kRows = kWarpRows * kLanesOfRow / 32;  // neighbouring rows per lane
static_assert(kRows % 4 == 0, "keys are read in fours");
constexpr int kGates = Config::gate_per_key ? kRows : 1;  // gates per lane and token
// Whether a call may use the delta rule. With a gate for every key dimension, it then does.
constexpr bool kAllowsDelta = Config::allows_delta;

class Step {
    using Format = FormatOf<Config::float32>::Type;
    using Item = Format::Item;
    using Sums = RowSums<kLanesOfRow, kStepWarps, 1 + kAllowsDelta>;

    // What a lane reads of one token, as it is in memory.
    struct Token {
        Format::Four q[kRows / 4], k[kRows / 4], v;
        uint32_t gates[kGates], beta;
    };

public:
    // index: of this CTA.
    FA_DEVICE Step(const StepParams& p, int index)
        : p_(p), warp_(warp_index()), is_delta_(kAllowsDelta && (Config::gate_per_key || p.overwrites)), sums_(warp_) {
        const int head = quotient(index, p.column_tiles), sequence = quotient(head, p.nheads);
        sequence_ = sequence;
        head_ = head - sequence * p.nheads;
        row_ = warp_ * kWarpRows + lane_index() / kLanesOfRow * kRows;
        column_ = (index - head * p.column_tiles) * kStepColumns + lane_index() % kLanesOfRow * 4;
    }

    FA_DEVICE void run() {
        read_state();
        int batch = sequence_, first = 0, last = p_.seqlen;
        if (p_.cu_seqlens != nullptr) {
            batch = 0;
            first = p_.cu_seqlens[sequence_];
            last = p_.cu_seqlens[sequence_ + 1];
        }
        find(batch, first);
        Token next{};
        // Each iteration reads the next token. The first one does nothing else, so that the code for reading exists once.
        for (int token = first - 1; token < last; ++token) {
            const Token now = next;
            if (token + 1 < last) next = read_next();
            if (token >= first) advance(now);
        }
        if (p_.final_state != nullptr) write_state();
    }

private:
    FA_DEVICE void read_state() {
        const float* from = p_.initial_state + sequence_ * p_.initial_stride_sequence + head_ * p_.initial_stride_head +
                            row_ * p_.initial_stride_row + column_;
        const int rows = p_.initial_state == nullptr ? 0 : p_.headdim_k - row_;
        if (is_in_fours(from, p_.initial_stride_row)) {
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
                const bool valid = i < rows && column_ < p_.headdim_v;
                const Words4 words = load_written_128(from + i * p_.initial_stride_row, valid);
#pragma unroll
                for (int j = 0; j < 4; ++j) state_[i][j] = as_float(words.word[j]);
            }
        } else {
#pragma unroll
            for (int i = 0; i < kRows; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const bool valid = i < rows && column_ + j < p_.headdim_v;
                    state_[i][j] = valid ? from[i * p_.initial_stride_row + j] : 0.0f;
                }
        }
    }

    FA_DEVICE void write_state() const {
        const int64_t first = (static_cast<int64_t>(sequence_) * p_.nheads + head_) * p_.headdim_k + row_;
        float* to = p_.final_state + first * p_.headdim_v + column_;
        const int rows = p_.headdim_k - row_;
        if (is_in_fours(to, p_.headdim_v)) {
#pragma unroll
            for (int i = 0; i < kRows; ++i)
                if (i < rows && column_ < p_.headdim_v) store_global_128(to + i * p_.headdim_v, InFloats::narrow(state_[i]));
        } else {
#pragma unroll
            for (int i = 0; i < kRows; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    if (i < rows && column_ + j < p_.headdim_v) to[i * p_.headdim_v + j] = state_[i][j];
        }
    }

    // Whether all rows of a state can be read and written 16 bytes at a time.
    FA_DEVICE bool is_in_fours(const float* rows, int64_t stride) const {
        return (reinterpret_cast<int64_t>(rows) % 16 | stride % 4 | p_.headdim_v % 4) == 0;
    }

    // Finds where the first token is.
    FA_DEVICE void find(int batch, int token) {
        const int head_k = quotient(head_, p_.group_size);
        q_ = static_cast<const Item*>(p_.q) + batch * p_.q_stride_batch + token * p_.q_stride_token +
             head_k * p_.q_stride_head + row_;
        k_ = static_cast<const Item*>(p_.k) + batch * p_.k_stride_batch + token * p_.k_stride_token +
             head_k * p_.k_stride_head + row_;
        v_ = static_cast<const Item*>(p_.v) + batch * p_.v_stride_batch + token * p_.v_stride_token +
             head_ * p_.v_stride_head + column_;
        gate_ = batch * p_.g_stride_batch + token * p_.g_stride_token + head_ * p_.g_stride_head +
                (Config::gate_per_key ? row_ : 0);
        beta_ = batch * p_.beta_stride_batch + token * p_.beta_stride_token + head_ * p_.beta_stride_head;
        out_ = static_cast<Item*>(p_.out) +
               ((static_cast<int64_t>(batch) * p_.seqlen + token) * p_.nheads + head_) * p_.headdim_v + column_;
    }

    FA_DEVICE Token read_next() {
        Token x{};
#pragma unroll
        for (int i = 0; i < kRows; i += 4) {
            x.q[i / 4] = Columns<Format>::read(q_ + i, p_.headdim_k - row_ - i);
            x.k[i / 4] = Columns<Format>::read(k_ + i, p_.headdim_k - row_ - i);
        }
        x.v = Columns<Format>::read(v_, p_.headdim_v - column_);
        // Rows after the last one get gate 1.
        const int gates = Config::gate_per_key ? p_.headdim_k - row_ : 1;
#pragma unroll
        for (int i = 0; i < kGates; ++i)
            if (i < gates) x.gates[i] = read_bits(p_.g, gate_ + i, p_.g_format);
        if (kAllowsDelta && p_.beta != nullptr) x.beta = read_bits(p_.beta, beta_, p_.beta_format);
        q_ += p_.q_stride_token;
        k_ += p_.k_stride_token;
        v_ += p_.v_stride_token;
        gate_ += p_.g_stride_token;
        beta_ += p_.beta_stride_token;
        return x;
    }

    // Updates the state with a token, and writes its out.
    FA_DEVICE void advance(const Token& token) {
        apply_gates(token);
        float q[kRows], k[kRows];
        float of_columns[1 + kAllowsDelta][4] = {}, of_rows[4] = {};  // S^T q and S^T k; q . k, k . k and q . q
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            q[i] = Format::widen(Format::get(token.q[i / 4], i % 4));
            k[i] = Format::widen(Format::get(token.k[i / 4], i % 4));
            of_rows[0] += q[i] * k[i];
            of_rows[1] += k[i] * k[i];
            of_rows[2] += q[i] * q[i];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                of_columns[0][j] += state_[i][j] * q[i];
                if constexpr (kAllowsDelta) of_columns[1][j] += state_[i][j] * k[i];
            }
        }
        sums_.add_up(of_columns, of_rows);
        constexpr float kEpsilon = 1e-6f;  // as in linear/reference.py
        const float k_factor = p_.l2norm ? reciprocal_root(of_rows[1] + kEpsilon) : 1.0f;
        const float q_factor = p_.l2norm ? p_.scale * reciprocal_root(of_rows[2] + kEpsilon) : p_.scale;
        const float beta = kAllowsDelta && p_.beta != nullptr ? widen_bits(token.beta, p_.beta_format) : 1.0f;
        const bool skips = !Config::gate_per_key && p_.skip != nullptr;
        const float skip = skips ? p_.skip[head_] : 0.0f;
        float out[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float value = Format::widen(Format::get(token.v, j));
            const float held = is_delta_ ? k_factor * of_columns[kAllowsDelta][j] : 0.0f;
            const float update = k_factor * beta * (value - held);
            out[j] = q_factor * (of_columns[0][j] + of_rows[0] * update);
            if (skips) out[j] += skip * value;
#pragma unroll
            for (int i = 0; i < kRows; ++i) state_[i][j] += k[i] * update;
        }
        if (warp_ == 0 && lane_index() < kLanesOfRow)
            Columns<Format>::write(out_, p_.headdim_v - column_, Format::narrow(out));
        out_ += p_.nheads * p_.headdim_v;
    }

    FA_DEVICE void apply_gates(const Token& token) {
        float gates[kGates];
#pragma unroll
        for (int i = 0; i < kGates; ++i) gates[i] = gate_of(widen_bits(token.gates[i], p_.g_format));
#pragma unroll
        for (int i = 0; i < kRows; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) state_[i][j] *= gates[i % kGates];
    }

    const StepParams& p_;
    const int warp_;
    const bool is_delta_;  // whether the call uses the delta rule
    int sequence_, head_, row_, column_;
    const Item *q_, *k_, *v_;  // rows of the token that is read next
    int64_t gate_, beta_;      // offsets of its gates and beta
    Item* out_;                // the row of the token that is computed next
    float state_[kRows][4];
    Sums sums_;
};

}  // namespace fastattention

extern "C" FA_KERNEL void FA_LAUNCH_BOUNDS(fastattention::kStepWarps * 32,
                                           fastattention::kStepWarpsOfSm / fastattention::kStepWarps)
    fastattention_linear_step(FA_PARAMETER fastattention::StepParams params) {
    using namespace fastattention;
    Step step(params, static_cast<int>(cta_index()));
    wait_for_previous_kernel();
    let_next_kernel_start();
    step.run();
}
