// Merges the splits of a decode by log-sum-exp.
#pragma once

namespace FA_NAMESPACE {

// Merges the splits of one key head exactly, by their running maxima and sums. next: from one split to the next; stride: from
// one row to the next.
template <class Element>
static void decode_merge(const Call& call, const DecodeSplit* splits, int64_t num_splits, int64_t next, int64_t stride) {
    const Sequence& s = call.sequences[splits[0].sequence];
    const ScoreUnits units = ScoreUnits::of(*call.params);
    const int64_t columns = round_up(call.params->headdim_v, Vec::kWidth);
    float acc_o[kMaxHeaddimV];
    for (int64_t row = 0; row < call.rows(s); ++row) {
        float row_max = -kInfinity, row_sum = 0.0f;
        for (int64_t i = 0; i < num_splits; ++i)
            row_max = splits[i * next].row_max[row] > row_max ? splits[i * next].row_max[row] : row_max;
        memset(acc_o, 0, columns * sizeof(float));
        // If a row saw no key, the weights are 0, and a NaN in a sum is kept.
        const float shift = row_max == -kInfinity ? 0.0f : row_max;
        for (int64_t i = 0; i < num_splits; ++i) {
            const DecodeSplit& split = splits[i * next];
            const float weight = units.rescaling(split.row_max[row], shift);
            const float* from = split.acc_o + row * stride;
            row_sum += weight * split.row_sum[row];
            for (int64_t c = 0; c < columns; c += Vec::kWidth)
                store(acc_o + c, fma(load(from + c), broadcast(weight), load(acc_o + c)));
        }
        store_result<Element>(call, s, query_row(call, splits[0].kv_head, row), acc_o, row_max, row_sum);
    }
}

}  // namespace FA_NAMESPACE
