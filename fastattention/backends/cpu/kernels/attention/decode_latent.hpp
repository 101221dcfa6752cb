// Decode of many query rows against keys whose first columns are their values, as in multi-head latent attention: keys and
// values are one tensor, and dozens of query heads share its one head.
//
// A block of keys is read from memory once, for all rows and for both products, while the next block is prefetched:
//
//   scores  keys in place x queries, stored by unit: a row of scores belongs to a key, with query rows side by side
//   values  weights, read by columns, x the same keys in place, or interleaved pairs of them
//
// Keys are never transposed, and maxima and sums run along vectors of query rows. Keys are copied first only if they are
// stored in another type, are not at equal distances, or do not fill their units.
#pragma once

namespace FA_NAMESPACE {

// Rows of a pass. Their queries and results fit the L2 cache together with a block of keys: with headdim 576 and 512 they
// take about 740 KB in floats with AVX-512, 360 KB elsewhere, and 600 KB in pairs of bfloat16.
static constexpr int64_t kLatentRows = Vec::kWidth == 16 ? 128 : 64;

// The layout of the working memory of a task, in floats.
template <class Unit>
struct LatentGeometry {
    int64_t key_units, key_stride;         // for copied keys
    int64_t value_columns, value_stride;   // for interleaved values
    int64_t queries, keys, scores, weights, values, total;

    explicit LatentGeometry(const FaAttentionParams& p) {
        constexpr bool kPairs = Unit::kElements == 2;
        constexpr int64_t kKeys = kLatentKeys<Unit>;
        key_units = round_up(p.headdim, Unit::kElements * Unit::kDepthStep) / Unit::kElements;
        key_stride = key_units + kRowPadding;
        value_columns = round_up(p.headdim_v, Vec::kWidth);
        value_stride = value_columns + kRowPadding;
        queries = 0;
        keys = queries + key_units * kLatentRows;
        scores = keys + kKeys * key_stride;
        weights = scores + kKeys * kLatentRows;
        values = weights + (kPairs ? kLatentRows * (kKeys / 2 + kRowPadding) : 0);
        total = values + (kPairs ? kKeys / 2 * (value_stride + Vec::kWidth) : 0);
    }
};

// Whether keys in memory are units of a product already.
template <class Stored, int kElements>
constexpr bool kHoldsUnits = false;
template <>
constexpr bool kHoldsUnits<float, 1> = true;
template <>
constexpr bool kHoldsUnits<Bfloat16, 2> = true;

// Rows first_row ... first_row + num_rows - 1 of one split.
template <class Stored, class Unit>
class LatentDecode {
public:
    LatentDecode(const Call& call, const DecodeSplit& split, int64_t first_row, int64_t num_rows, int64_t stride,
                 float* scratch)
        : call_(call),
          p_(*call.params),
          split_(split),
          sequence_(call.sequences[split.sequence]),
          geometry_(p_),
          units_(ScoreUnits::of(p_)),
          first_row_(first_row),
          num_rows_(num_rows),
          rows_(round_up(num_rows, Vec::kWidth)),
          stride_(stride),
          queries_(scratch + geometry_.queries),
          keys_(scratch + geometry_.keys),
          scores_(scratch + geometry_.scores),
          weights_(kPairs ? scratch + geometry_.weights : scores_),
          values_(scratch + geometry_.values),
          acc_o_(split.acc_o + first_row * stride),
          row_max_(split.row_max + first_row),
          row_sum_(split.row_sum + first_row) {}

    void run() {
        Unit::begin();
        start();
        const TileRange& mask = sequence_.mask;
        const int64_t first_token = row(0).token, last_token = row(num_rows_ - 1).token;
        const int64_t begin = larger(split_.key_begin, mask.row_begin(first_token));
        const int64_t end = smaller(split_.key_end, mask.row_end(last_token));
        const Rows k = call_.keys(sequence_, split_.kv_head);
        for (int64_t key = begin; key < end; key += kKeys) {
            first_ = key;
            n_ = smaller(kKeys, end - key);
            padded_ = round_up(n_, kLatentStep);
            block_.locate(k, key, end, 2 * kKeys);
            attend(mask.classify(first_token, last_token, key, key + n_ - 1));
        }
        Unit::end();
    }

private:
    static constexpr bool kPairs = Unit::kElements == 2;
    static constexpr int64_t kKeys = kLatentKeys<Unit>;
    static constexpr int64_t kHalf = kKeys / 2;  // keys that are prefetched during each product

    QueryRow row(int64_t r) const { return query_row(call_, split_.kv_head, first_row_ + r); }

    void start() {
        const int64_t units = geometry_.key_units;
        float block[Vec::kWidth * kBlockStride];
        for (int64_t first = 0; first < rows_; first += Vec::kWidth) {
            for (int64_t i = 0; i < Vec::kWidth; ++i) {
                float* query = block + i * kBlockStride;
                if (first + i >= num_rows_) {
                    memset(query, 0, round_up(units, Vec::kWidth) * sizeof(float));
                    continue;
                }
                load_query(call_, sequence_, row(first + i), query, units * Unit::kElements);
                // Works in place: writes never overtake reads.
                if constexpr (kPairs) narrow_row(query, reinterpret_cast<Bfloat16*>(query), units * 2);
            }
            transpose_keys(block, queries_ + in_panels(first, units), units, kLatentPanel);
        }
        memset(acc_o_, 0, rows_ * stride_ * sizeof(float));
        for (int64_t r = 0; r < rows_; r += Vec::kWidth) {
            store(row_max_ + r, broadcast(-kInfinity));
            store(row_sum_ + r, zero());
        }
    }

    void attend(TileKind kind) {
        if (kind == TileKind::kSkipped) return;
        int64_t stride;
        const float* keys = units_of_keys(stride);
        using Products = LatentProducts<Unit>;
        const int64_t bytes = p_.headdim * static_cast<int64_t>(sizeof(Stored));
        NextRows first_half(block_.addresses + kKeys, kHalf, bytes);
        Products::score(keys, stride, padded_, queries_, geometry_.key_units, scores_, rows_, first_half);
        if constexpr (kQuantized<Stored>) scale_scores();
        if (units_.modified) score_mod();
        for (int64_t j = n_; j < padded_; ++j) hide(j, 0, rows_);
        if (kind == TileKind::kPartial) apply_mask();
        for (int64_t r = 0; r < rows_; r += Vec::kWidth) softmax(r);
        const int64_t units = padded_ / Unit::kElements;
        const float* values = keys;
        if constexpr (kPairs) {
            Products::finish_weights(weights_, rows_, units);
            interleave_values(reinterpret_cast<const Bfloat16*>(keys), 2 * stride);
            values = values_;
            stride = geometry_.value_stride;
        }
        NextRows second_half(block_.addresses + kKeys + kHalf, kHalf, bytes);
        Products::accumulate(weights_, values, stride, units, acc_o_, stride_, rows_, geometry_.value_columns, second_half);
    }

    // The keys of the block in place, if the products can read them so; otherwise a copy, with zeros after the last key.
    const float* units_of_keys(int64_t& stride) {
        if constexpr (kHoldsUnits<Stored, Unit::kElements>) {
            const bool fills_units =
                p_.headdim % (Unit::kElements * Unit::kDepthStep) == 0 && (kPairs || geometry_.value_columns <= p_.headdim);
            const auto address = reinterpret_cast<uintptr_t>(block_[0]);
            const int64_t bytes = block_.addresses[1] - block_.addresses[0];
            if (fills_units && n_ == padded_ && address % 4 == 0 && bytes % 4 == 0 && equally_spaced(bytes)) {
                stride = bytes / 4;
                return reinterpret_cast<const float*>(block_[0]);
            }
        }
        stride = geometry_.key_stride;
        for (int64_t j = 0; j < padded_; ++j) {
            float* to = keys_ + j * stride;
            if (j >= n_) {
                memset(to, 0, stride * sizeof(float));
            } else if constexpr (kPairs) {
#ifdef FA_HAS_BF16_DOT
                auto* pairs = reinterpret_cast<Bfloat16*>(to);
                copy_row(block_[j], pairs, p_.headdim);
                memset(pairs + p_.headdim, 0, (2 * geometry_.key_units - p_.headdim) * sizeof(Bfloat16));
#endif
            } else {
                widen_row(block_[j], to, p_.headdim, geometry_.key_units);
            }
        }
        return keys_;
    }

    bool equally_spaced(int64_t bytes) const {
        int64_t differences = 0;
        for (int64_t j = 1; j + 1 < n_; ++j) differences |= (block_.addresses[j + 1] - block_.addresses[j]) ^ bytes;
        return differences == 0;
    }

    float* score_at(int64_t key, int64_t row) const { return scores_ + in_panels(row, kKeys) + key * kLatentPanel; }

    void hide(int64_t key, int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) *score_at(key, r) = -kInfinity;
    }

    // Scales the scores of a quantized cache.
    void scale_scores() {
        load_scales(call_.key_scales(sequence_, split_.kv_head), first_, n_, key_scales_);
        load_scales(call_.value_scales(sequence_, split_.kv_head), first_, n_, value_scales_);
        for (int64_t j = 0; j < n_; ++j)
            for (int64_t r = 0; r < rows_; r += Vec::kWidth) {
                float* at = score_at(j, r);
                store(at, load(at) * broadcast(key_scales_[j]));
            }
    }

    // Modifies scores row by row, as each row has its own modifiers.
    void score_mod() {
        float scores[kKeys + Vec::kWidth];
        for (int64_t r = 0; r < num_rows_; ++r) {
            for (int64_t j = 0; j < n_; ++j) scores[j] = *score_at(j, r);
            modify_scores(score_row(call_, sequence_, row(r).token, row(r).head), scores, first_, n_);
            for (int64_t j = 0; j < n_; ++j) *score_at(j, r) = scores[j];
        }
    }

    void apply_mask() {
        for (int64_t r = 0; r < num_rows_; ++r) {
            const int64_t begin = sequence_.mask.row_begin(row(r).token) - first_;
            const int64_t end = sequence_.mask.row_end(row(r).token) - first_;
            for (int64_t j = 0; j < smaller(begin, n_); ++j) hide(j, r, r + 1);
            for (int64_t j = larger(end, 0); j < n_; ++j) hide(j, r, r + 1);
        }
    }

    // Turns the scores of a vector of rows, starting at row r, into weights.
    void softmax(int64_t r) {
        const float* scores = score_at(0, r);
        Vec highest = load(scores);
        for (int64_t j = 1; j < padded_; ++j) highest = maximum(highest, load(scores + j * kLatentPanel));
        const Vec old_max = load(row_max_ + r);
        if (reduce_max(select_less(old_max, highest, broadcast(1.0f), zero())) > 0.0f) online_max(r, highest);
        const Vec reference = ScoreUnits::reference(load(row_max_ + r));
        Vec sum = zero();
        auto weight = [&](int64_t j) __attribute__((always_inline)) {
            const Vec p = units_.template weight<!kPairs>(load(scores + j * kLatentPanel), reference);
            sum = sum + p;
            if constexpr (kQuantized<Stored>) return p * broadcast(j < n_ ? value_scales_[j] : 0.0f);
            return p;
        };
        for (int64_t j = 0; j < padded_; j += Unit::kElements) {
            if constexpr (kPairs) {
#ifdef FA_HAS_BF16_DOT
                const Vec first = weight(j), second = weight(j + 1);
                LatentProducts<Unit>::store_weights(weights_, j / 2, r, to_pairs(first, second));
#endif
            } else {
                store(score_at(j, r), weight(j));  // where weights_ is too
            }
        }
        store(row_sum_ + r, load(row_sum_ + r) + sum);
    }

    void online_max(int64_t r, Vec highest) {
        float lanes[Vec::kWidth];
        store(lanes, highest);
        for (int64_t i = 0; i < Vec::kWidth; ++i) {
            float& max = row_max_[r + i];
            if (!(lanes[i] > max)) continue;
            if (max != -kInfinity) {
                const float factor = units_.rescaling(max, lanes[i]);
                row_sum_[r + i] *= factor;
                float* acc_o = acc_o_ + (r + i) * stride_;
                for (int64_t c = 0; c < stride_; c += Vec::kWidth) store(acc_o + c, load(acc_o + c) * broadcast(factor));
            }
            max = lanes[i];
        }
    }

    // Interleaves pairs of keys, column by column.
    void interleave_values(const Bfloat16* keys, int64_t stride) {
#ifdef FA_HAS_BF16_DOT
        constexpr int64_t kChunk = 2 * Vec::kWidth;
        for (int64_t j = 0; j < padded_; j += 2)
            for (int64_t c = 0; c < p_.headdim_v; c += kChunk) {
                const int n = static_cast<int>(smaller(p_.headdim_v - c, kChunk));
                const Bfloat16* from = keys + j * stride + c;
                Vec first, second;
                interleave_pairs(load_pairs_partial(from, n), load_pairs_partial(from + stride, n), first, second);
                float* to = values_ + j / 2 * geometry_.value_stride + c;
                store(to, first);
                store(to + Vec::kWidth, second);
            }
#else
        (void)keys, (void)stride;
#endif
    }

    const Call& call_;
    const FaAttentionParams& p_;
    const DecodeSplit& split_;
    const Sequence& sequence_;
    const LatentGeometry<Unit> geometry_;
    const ScoreUnits units_;
    const int64_t first_row_, num_rows_, rows_, stride_;
    float *queries_, *keys_, *scores_, *weights_, *values_;
    float *acc_o_, *row_max_, *row_sum_;  // results of the split, with room for whole vectors of rows
    KeyBlockRows<Stored, 2 * kKeys> block_;  // this block and the next one
    int64_t first_, n_, padded_;  // keys of the block
    float key_scales_[kKeys], value_scales_[kKeys];
};

template <class Stored, class Unit>
static void decode_latent_split(const Call& call, const DecodeSplit& split, int64_t stride, float* scratch) {
    const int64_t rows = call.rows(call.sequences[split.sequence]);
    for (int64_t row = 0; row < rows; row += kLatentRows)
        LatentDecode<Stored, Unit>(call, split, row, smaller(kLatentRows, rows - row), stride, scratch).run();
}

}  // namespace FA_NAMESPACE
