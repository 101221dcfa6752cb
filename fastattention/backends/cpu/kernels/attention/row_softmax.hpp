// The online softmax of rows with contiguous scores: tile by tile, scores become weights in place.
#pragma once

namespace FA_NAMESPACE {

// The running state of a row from tile to tile.
struct RunningRow {
    float* max;  // maximum of its scores, see ScoreUnits
    float* sum;  // sum of its weights, as a vector of partial sums
    float* acc_o;
    int64_t columns;  // columns of acc_o, a multiple of the vector width
};

// Factors of a tile's scores and weights, one per score, in whole vectors; null for none. They are the scales of keys and
// values in a quantized cache, or the dropout factors of weights.
struct TileScales {
    const float* keys = nullptr;
    const float* values = nullptr;
};

// Unit: the unit of products with the weights.
template <class Unit>
class RowSoftmax {
public:
    RowSoftmax(const Call& call, const Sequence& sequence)
        : call_(call), sequence_(sequence), units_(ScoreUnits::of(*call.params)) {}

    // Turns scores of a tile of keys, starting at `key`, into weights relative to the row's maximum, and rescales what was
    // accumulated before. The row sees scores `begin` to `end`. Weights are 0 where hidden, and up to `padded`.
    void update(QueryRow at, float* scores, int64_t key, int64_t begin, int64_t end, int64_t padded, RunningRow row,
                TileScales scales = {}) const {
        if (begin >= end) return clear(scores, padded);
        modify(at, scores, key, end, scales.keys);
        weigh(scores, begin, end, padded, row, scales.values);
    }

    // The first half of `update`: turns products with n keys, starting at `key`, into scores.
    void modify(QueryRow at, float* scores, int64_t key, int64_t n, const float* key_scales) const {
        if (key_scales) multiply(scores, key_scales, n);
        if (units_.modified) modify_scores(score_row(call_, sequence_, at.token, at.head), scores, key, n);
    }

    // Whether `modify` does more than multiply.
    bool modifies() const { return units_.modified; }

    const ScoreUnits& units() const { return units_; }

    static void rescale(RunningRow row, float factor) {
        const Vec by = broadcast(factor);
        for (int64_t c = 0; c < row.columns; c += Vec::kWidth) store(row.acc_o + c, load(row.acc_o + c) * by);
        store(row.sum, load(row.sum) * by);
    }

    // The second half: turns scores into weights, times the scales of values unless these are null. known: the highest score
    // in each lane, or null if it is not known.
    void weigh(float* scores, int64_t begin, int64_t end, int64_t padded, RunningRow row, const float* value_scales,
               const Vec* known = nullptr) const {
        if (begin >= end) return clear(scores, padded);
        for (int64_t j = 0; j < begin; ++j) scores[j] = -kInfinity;
        for (int64_t j = end; j < padded; ++j) scores[j] = -kInfinity;

        const float old_max = *row.max;
        const float tile_max = reduce_max(known ? *known : highest_of(scores, padded));
        const float new_max = old_max > tile_max ? old_max : tile_max;
        if (new_max != old_max) {
            *row.max = new_max;
            if (old_max != -kInfinity) rescale(row, units_.rescaling(old_max, new_max));
        }
        const Vec sum = value_scales ? exponentiate<true>(scores, padded, new_max, value_scales)
                                     : exponentiate<false>(scores, padded, new_max, nullptr);
        store(row.sum, load(row.sum) + sum);
    }

private:
    // Uses two chains of maxima: one would take as long as the exponentials.
    static Vec highest_of(const float* scores, int64_t n) {
        Vec even = load(scores), odd = even;
        int64_t j = Vec::kWidth;
        for (; j + Vec::kWidth < n; j += 2 * Vec::kWidth) {
            odd = maximum(odd, load(scores + j));
            even = maximum(even, load(scores + j + Vec::kWidth));
        }
        if (j < n) odd = maximum(odd, load(scores + j));
        return maximum(even, odd);
    }

    static void multiply(float* scores, const float* by, int64_t n) {
        for (int64_t j = 0; j < n; j += Vec::kWidth) store(scores + j, load(scores + j) * load(by + j));
    }

    // Overwrites scores with their weights, times the scales of the values, and returns the sum of unscaled weights in each
    // lane. Pairs are written as bfloat16 from the start of the row; writes never overtake reads.
    template <bool kScaled>
    Vec exponentiate(float* scores, int64_t padded, float max, const float* value_scales) const {
        const ScoreUnits units = units_;  // a copy, as stores of weights might change what `this` holds
        const Vec reference = ScoreUnits::reference(broadcast(max));
        Vec sum = zero();
        for (int64_t j = 0; j < padded; j += Vec::kWidth) {
            Vec p = units.template weight<Unit::kElements == 1>(load(scores + j), reference);
            sum = sum + p;
            if (kScaled) p = p * load(value_scales + j);
            if (Unit::kElements == 1) {
                store(scores + j, p);
            } else {
                store(reinterpret_cast<Bfloat16*>(scores) + j, p);
            }
        }
        return sum;
    }

    static void clear(float* scores, int64_t padded) { memset(scores, 0, padded / Unit::kElements * sizeof(float)); }

    const Call& call_;
    const Sequence& sequence_;
    const ScoreUnits units_;
};

}  // namespace FA_NAMESPACE
