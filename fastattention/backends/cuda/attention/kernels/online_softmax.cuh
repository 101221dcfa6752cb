// The online softmax of a warp's rows: a running maximum and sum of each row, while scores come tile by tile.
#pragma once

#include FA_ARCH_HEADER

#include "dropout.cuh"
#include "scales.cuh"

namespace fastattention {

using LaneScales = ScalesOfLane<Arch>;

// Sums of int8 products start at this: the bits of 1.5 * 2^23 as a float. With a sum of up to 2^22 added to the bits, the
// float grows by as much, so no conversion is needed.
constexpr uint32_t kInt8Origin = 0x4b400000u;
constexpr bool kScoresHaveOrigin = kInt8Products && !kModifiesScores;  // until exponentials are computed

// Probabilities are relative to the running maximum, which may stay below the highest score by kSlack. Accumulated results
// are rescaled only when a score exceeds that, which is rare after the first tiles.
template <int kSteps>
class OnlineSoftmax {
public:
    using Scores = float[kSteps][kWarpKeys / 8][Arch::kElements];
    using OfRows = float[kSteps][2];
    using Kept = DropoutOfLane<Arch, kSteps, kWarpKeys / 8>;

    // max_of_score: the factor from scores to the unit of maxima.
    FA_DEVICE explicit OnlineSoftmax(float max_of_score) {
        set_max_of_scores(max_of_score);
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
#pragma unroll
            for (int which = 0; which < 2; ++which) {
                max_[step][which] = -infinity();
                sum_[step][which] = 0.0f;
            }
    }

    FA_DEVICE float max(int step, int which) const { return max_[step][which]; }

    // Sets the factor of a row. Only products in int8 need it: elsewhere all rows share one.
    FA_DEVICE void set_max_of_score(int step, int which, float max_of_score) {
        max_of_score_[kInt8Products ? step : 0][kInt8Products ? which : 0] = max_of_score;
    }

    FA_DEVICE void set_max_of_scores(float max_of_score) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
#pragma unroll
            for (int which = 0; which < 2; ++which) set_max_of_score(step, which, max_of_score);
    }

    // Whether scores are in the unit of maxima before they are given.
    FA_DEVICE bool multiplies_first() const { return multiplies_first_; }

    // Turns scores into the unit of maxima. From the next tile on the caller does so first.
    FA_DEVICE void multiply(Scores& scores) {
        const float origin = kScoresHaveOrigin ? as_float(kInt8Origin) : 0.0f;
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
#pragma unroll
            for (int n = 0; n < kWarpKeys / 8; ++n)
#pragma unroll
                for (int i = 0; i < Arch::kElements; ++i) {
                    const float times = max_of_score(step, Arch::row_of_element(i));
                    scores[step][n][i] = multiply_rounded(scores[step][n][i] - origin, times);
                }
        set_max_of_scores(1.0f);
        multiplies_first_ = true;
    }

    // Whether a running maximum is so large that its rounding error would show in exponents, in which products of scores
    // are not rounded.
    FA_DEVICE bool has_large_max() const {
        constexpr float kLargestFused = 65536.0f;  // its last bit is 2^-7
        bool large = false;
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
#pragma unroll
            for (int which = 0; which < 2; ++which) {
                const float shift = shift_of(max_[step][which]);
                large |= larger(shift, -shift) > kLargestFused;
            }
        return large;
    }

    // The sum of a row over all keys so far.
    FA_DEVICE float total(int step, int which) const { return Arch::reduce_row(sum_[step][which], add); }

    // The sums over the columns of this lane.
    FA_DEVICE OfRows& sums() { return sum_; }

    static FA_DEVICE float add(float a, float b) { return a + b; }

    // Finds the highest score of each row in a tile of keys, in the unit of maxima. Returns whether one exceeds the running
    // maximum by more than kSlack.
    FA_DEVICE bool find_highest(OfRows& highest, const Scores& scores, const LaneScales& scales) const {
        constexpr float kSlack = 8.0f / kLog2OfMax;  // probabilities up to 2^8: far from overflow, as exact as those up to 1
        bool raised = false;
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
#pragma unroll
            for (int which = 0; which < 2; ++which) {
                highest[step][which] = highest_weight(scores, scales, step, which);
                raised |= highest[step][which] > max_[step][which] + kSlack;
            }
        return raised;
    }

    // Returns the factor that rescales what was accumulated relative to the old maximum.
    FA_DEVICE float raise_max(int step, int which, float highest) {
        const float new_max = maximum(max_[step][which], highest);
        const float factor = rescaling(max_[step][which], new_max);
        sum_[step][which] *= factor;
        max_[step][which] = new_max;
        return factor;
    }

    // Exponentiates the scores of kTiles tiles of eight keys, starting at tile `first`. `probabilities` may be `scores`.
    template <int kTiles>
    FA_DEVICE void exponentiate(Scores& probabilities, const Scores& scores, OfRows& sums, const LaneScales& scales,
                                int first, const Kept& kept) const {
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
#pragma unroll
            for (int which = 0; which < 2; ++which) {
                const float times = max_of_score(step, which);
                float shift = shift_of(max_[step][which]);
                shift += origin() * times;
#pragma unroll
                for (int n = first; n < first + kTiles; ++n) {
                    float sum = 0.0f;
#pragma unroll
                    for (int i = 0; i < Arch::kElements; ++i)
                        if (Arch::row_of_element(i) == which) {
                            const float exponent = multiply_add(scores[step][n][i], times, -shift);
                            const float s = exp2_approximate(exponent * kLog2OfMax);
                            sum = i == first_element(which) ? s : sum + s;
                            probabilities[step][n][i] = kept.weight(scales.weight(s, n, i), step, n, i);
                        }
                    sums[step][which] += sum;
                }
            }
    }

private:
    // The highest score of a row. With a quantized cache a score includes the log of its value's scale, because their
    // product is what becomes 16 bits wide.
    FA_DEVICE float highest_weight(const Scores& scores, const LaneScales& scales, int step, int which) const {
        if constexpr (kScoresHaveOrigin) return (highest_score(scores, step, which) - origin()) * max_of_score(step, which);
        if constexpr (!kQuantized) return highest_score(scores, step, which) * max_of_score(step, which);
        float highest = -infinity();
#pragma unroll
        for (int n = 0; n < kWarpKeys / 8; ++n)
#pragma unroll
            for (int i = 0; i < Arch::kElements; ++i)
                if (Arch::row_of_element(i) == which)
                    highest = maximum(
                        highest, scores[step][n][i] * max_of_score(step, which) + scales.log2_of_weight(n, i) / kLog2OfMax);
        return Arch::reduce_row(highest, [](float a, float b) { return maximum(a, b); });
    }

    static FA_DEVICE float highest_score(const Scores& scores, int step, int which) {
        float highest = scores[step][0][first_element(which)];
#pragma unroll
        for (int n = 0; n < kWarpKeys / 8; ++n)
#pragma unroll
            for (int i = 0; i < Arch::kElements; ++i)
                if (Arch::row_of_element(i) == which) highest = maximum(highest, scores[step][n][i]);
        return Arch::reduce_row(highest, [](float a, float b) { return maximum(a, b); });
    }

    static FA_DEVICE constexpr int first_element(int which) {
        for (int i = 0; i < Arch::kElements; ++i)
            if (Arch::row_of_element(i) == which) return i;
        return 0;
    }

    FA_DEVICE float max_of_score(int step, int which) const {
        return max_of_score_[kInt8Products ? step : 0][kInt8Products ? which : 0];
    }

    // What scores are above their values.
    FA_DEVICE float origin() const { return kScoresHaveOrigin && !multiplies_first_ ? as_float(kInt8Origin) : 0.0f; }

    bool multiplies_first_ = false;
    float max_of_score_[kInt8Products ? kSteps : 1][kInt8Products ? 2 : 1];  // one for each row, or for all
    OfRows max_, sum_;
};

}  // namespace fastattention
