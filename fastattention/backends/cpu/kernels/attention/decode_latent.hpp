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
static constexpr int64_t kLatentKeys = Vec::kWidth == 16 ? 64 : 32;  // keys of a block

// The layout of the working memory of a task, in floats.
template <class Unit>
struct LatentGeometry {
    int64_t key_units, key_stride;         // for copied keys
    int64_t value_columns, value_stride;   // for interleaved values
    int64_t queries, keys, scores, weights, values, total;

    explicit LatentGeometry(const FaAttentionParams& p) {
        constexpr bool kPairs = Unit::kElements == 2;
        key_units = round_up(p.headdim, Unit::kElements * Unit::kDepthStep) / Unit::kElements;
        key_stride = key_units + kRowPadding;
        value_columns = round_up(p.headdim_v, Vec::kWidth);
        value_stride = value_columns + kRowPadding;
        queries = 0;
        keys = queries + key_units * kLatentRows;
        scores = keys + kLatentKeys * key_stride;
        weights = scores + kLatentKeys * kLatentRows;
        values = weights + (kPairs ? kLatentRows * (kLatentKeys / 2 + kRowPadding) : 0);
        total = values + (kPairs ? kLatentKeys / 2 * (value_stride + Vec::kWidth) : 0);
    }
};

// Whether keys in memory are units of a product already.
template <class Stored, int kElements>
constexpr bool kHoldsUnits = false;
template <>
constexpr bool kHoldsUnits<float, 1> = true;
template <>
constexpr bool kHoldsUnits<Bfloat16, 2> = true;

// Prefetches rows, a cache line at a time.
class NextRows {
public:
    // bytes: length of a row.
    NextRows(char* const* rows, int64_t n, int64_t bytes)
        : at_(rows[0]), end_(at_ + bytes), next_(rows + 1), bytes_(bytes), left_(n) {}

    __attribute__((always_inline)) void prefetch_line() {
        if (left_ == 0) return;
        prefetch(at_);
        at_ += 64;
        if (at_ < end_) return;
        if (--left_ == 0) return;
        at_ = *next_++;
        end_ = at_ + bytes_;
    }

    int64_t lines() const { return (bytes_ + 63) / 64 * left_; }

private:
    const char *at_, *end_;
    char* const* next_;
    const int64_t bytes_;
    int64_t left_;
};

// Called once per step of a product: prefetches a line, or several lines, of the next block.
struct FetchLine {
    NextRows* rows;
    __attribute__((always_inline)) void fetch(const void*, int64_t) const { rows->prefetch_line(); }
};
struct FetchLines {
    NextRows* rows;
    int64_t lines;
    __attribute__((always_inline)) void fetch(const void*, int64_t) const {
        for (int64_t i = 0; i < lines; ++i) rows->prefetch_line();
    }
};

// C += A^T B: A is (depth, rows) with `a_stride` floats from one of its rows to the next; see multiply_tile for the rest.
template <class Unit, int kRowCount, int kUsed, class Fetch>
FA_INLINE void multiply_columns_tile(const float* a, int64_t a_stride, const float* b, int64_t b_stride, int64_t depth,
                                     float* c, int64_t c_stride, Fetch ahead) {
    Vec acc[kRowCount][kUsed];
#pragma GCC unroll 8
    for (int i = 0; i < kRowCount; ++i)
#pragma GCC unroll 2
        for (int j = 0; j < kUsed; ++j) acc[i][j] = load(c + i * c_stride + j * Vec::kWidth);
    for (int64_t k = 0; k < depth; ++k) {
        ahead.fetch(b, 0);
        Vec columns[kUsed];
#pragma GCC unroll 2
        for (int j = 0; j < kUsed; ++j) columns[j] = load(b + k * b_stride + j * Vec::kWidth);
#pragma GCC unroll 8
        for (int i = 0; i < kRowCount; ++i) {
            const Vec row = broadcast(a[k * a_stride + i]);
#pragma GCC unroll 2
            for (int j = 0; j < kUsed; ++j) acc[i][j] = Unit::multiply_add(acc[i][j], row, columns[j]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < kRowCount; ++i)
#pragma GCC unroll 2
        for (int j = 0; j < kUsed; ++j) store(c + i * c_stride + j * Vec::kWidth, acc[i][j]);
}

// The two products of a unit. `rows` is a multiple of the vector width, up to kLatentRows.
template <class Unit>
struct LatentProducts {
    // The number of keys or rows that fill the registers together with two vectors of rows or columns; twice that with one.
    static constexpr int kStep = Vec::kRegisters == 32 ? 8 : 4;

    // scores (kLatentKeys, rows) = keys (kLatentKeys, units) x queries (units, rows)
    static void score(const float* keys, int64_t key_stride, const float* queries, int64_t units, float* scores, int64_t rows,
                      NextRows& next) {
        const FetchLine ahead = {&next};
        int64_t row = 0;
        for (; row + 2 * Vec::kWidth <= rows; row += 2 * Vec::kWidth)
            for (int64_t j = 0; j < kLatentKeys; j += kStep)
                multiply_tile<Unit, kStep, 2, false>(keys + j * key_stride, key_stride, queries + row, rows, units,
                                                     scores + j * rows + row, rows, ahead);
        if (row < rows)
            for (int64_t j = 0; j < kLatentKeys; j += 2 * kStep)
                multiply_tile<Unit, 2 * kStep, 1, false>(keys + j * key_stride, key_stride, queries + row, rows, units,
                                                         scores + j * rows + row, rows, ahead);
    }

    // acc_o (rows, columns) += weights (units, rows)^T x values (units, columns)
    static void accumulate(const float* weights, const float* values, int64_t value_stride, int64_t units, float* acc_o,
                           int64_t acc_stride, int64_t rows, int64_t columns, NextRows& next) {
        const FetchLine ahead = {&next};
        for (int64_t c = 0; c < columns; c += 2 * Vec::kWidth)
            for (int64_t row = 0; row < rows; row += kStep) {
                float* to = acc_o + row * acc_stride + c;
                if (c + Vec::kWidth < columns) {
                    multiply_columns_tile<Unit, kStep, 2>(weights + row, rows, values + c, value_stride, units, to,
                                                          acc_stride, ahead);
                } else {
                    multiply_columns_tile<Unit, kStep, 1>(weights + row, rows, values + c, value_stride, units, to,
                                                          acc_stride, ahead);
                }
            }
    }

#ifdef FA_HAS_BF16_DOT
    // Stores the weights of a pair of keys, for a vector of rows.
    FA_INLINE void store_weights(float* weights, int64_t pair, int64_t row, int64_t rows, Vec pairs) {
        store(weights + pair * rows + row, pairs);
    }
    FA_INLINE void finish_weights(float*, int64_t) {}
#endif
};

#ifdef FA_HAS_MATRICES
template <>
struct LatentProducts<MatrixPair> : LatentProducts<Bfloat16Pair> {};
#endif

#ifdef FA_HAS_AMX
// AMX tiles read the weights row by row.
template <>
struct LatentProducts<AmxPair> {
    static constexpr int64_t kWeightStride = kLatentKeys / 2 + kRowPadding;

    static void score(const float* keys, int64_t key_stride, const float* queries, int64_t units, float* scores, int64_t rows,
                      NextRows& next) {
        multiply_panel<false>(AmxPair{}, keys, key_stride, queries, rows, units, scores, rows, kLatentKeys, rows,
                              fetch_with(next, kLatentKeys, rows, units));
    }

    static void accumulate(const float* weights, const float* values, int64_t value_stride, int64_t units, float* acc_o,
                           int64_t acc_stride, int64_t rows, int64_t columns, NextRows& next) {
        multiply_panel<true>(AmxPair{}, weights, kWeightStride, values, value_stride, units, acc_o, acc_stride, rows, columns,
                             fetch_with(next, rows, columns, units));
    }

    FA_INLINE void store_weights(float* weights, int64_t pair, int64_t row, int64_t, Vec pairs) {
        store(weights + (row + pair % kAmxTile) * kWeightStride + pair / kAmxTile * kAmxTile, pairs);
    }
    // Transposes squares of sixteen pairs and sixteen rows, which were stored by pair.
    static void finish_weights(float* weights, int64_t rows) {
        for (int64_t row = 0; row < rows; row += kAmxTile)
            for (int64_t pair = 0; pair < kLatentKeys / 2; pair += kAmxTile)
                transpose_square(weights + row * kWeightStride + pair, kWeightStride);
    }

private:
    // Spreads the lines of `next` over the steps of a product.
    static FetchLines fetch_with(NextRows& next, int64_t rows, int64_t columns, int64_t units) {
        constexpr int64_t kBoth = 2 * kAmxTile;
        const int64_t steps = (rows + kBoth - 1) / kBoth * ((columns + kBoth - 1) / kBoth) * (units / kAmxTile);
        return {&next, (next.lines() + steps - 1) / steps};
    }
};
#endif

// Rows first_row ... first_row + num_rows - 1 of one split.
template <class Stored, class Unit>
class LatentDecode {
public:
    LatentDecode(const Call& call, const DecodeSplit& split, int64_t first_row, int64_t num_rows, int64_t columns,
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
          columns_(columns),
          queries_(scratch + geometry_.queries),
          keys_(scratch + geometry_.keys),
          scores_(scratch + geometry_.scores),
          weights_(kPairs ? scratch + geometry_.weights : scores_),
          values_(scratch + geometry_.values),
          acc_o_(split.acc_o + first_row * columns),
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
        for (int64_t key = begin; key < end; key += kLatentKeys) {
            first_ = key;
            n_ = smaller(kLatentKeys, end - key);
            block_.locate(k, key, end, 2 * kLatentKeys);
            attend(mask.classify(first_token, last_token, key, key + n_ - 1));
        }
        Unit::end();
    }

private:
    static constexpr bool kPairs = Unit::kElements == 2;
    static constexpr int64_t kHalf = kLatentKeys / 2;  // keys that are prefetched during each product

    QueryRow row(int64_t r) const { return query_row(call_, split_.kv_head, first_row_ + r); }

    void start() {
        float wide[kMaxHeaddim + 2 * Vec::kWidth];
        memset(queries_, 0, geometry_.key_units * rows_ * sizeof(float));
        for (int64_t r = 0; r < num_rows_; ++r) {
            load_query(call_, sequence_, row(r), wide, geometry_.key_units * Unit::kElements);
            // Works in place: writes never overtake reads.
            if constexpr (kPairs) narrow_row(wide, reinterpret_cast<Bfloat16*>(wide), geometry_.key_units * 2);
            for (int64_t u = 0; u < geometry_.key_units; ++u) memcpy(queries_ + u * rows_ + r, wide + u, sizeof(float));
        }
        memset(acc_o_, 0, rows_ * columns_ * sizeof(float));
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
        NextRows first_half(block_.addresses + kLatentKeys, kHalf, bytes);
        Products::score(keys, stride, queries_, geometry_.key_units, scores_, rows_, first_half);
        if constexpr (kQuantized<Stored>) scale_scores();
        if (units_.modified) score_mod();
        for (int64_t j = n_; j < kLatentKeys; ++j) hide(j, 0, rows_);
        if (kind == TileKind::kPartial) apply_mask();
        for (int64_t r = 0; r < rows_; r += Vec::kWidth) softmax(r);
        const int64_t units = kLatentKeys / Unit::kElements;
        const float* values = keys;
        if constexpr (kPairs) {
            Products::finish_weights(weights_, rows_);
            interleave_values(reinterpret_cast<const Bfloat16*>(keys), 2 * stride);
            values = values_;
            stride = geometry_.value_stride;
        }
        NextRows second_half(block_.addresses + kLatentKeys + kHalf, kHalf, bytes);
        Products::accumulate(weights_, values, stride, units, acc_o_, columns_, rows_, geometry_.value_columns, second_half);
    }

    // The keys of the block in place, if the products can read them so; otherwise a copy, with zeros after the last key.
    const float* units_of_keys(int64_t& stride) {
        if constexpr (kHoldsUnits<Stored, Unit::kElements>) {
            const bool fills_units =
                p_.headdim % (Unit::kElements * Unit::kDepthStep) == 0 && (kPairs || geometry_.value_columns <= p_.headdim);
            const auto address = reinterpret_cast<uintptr_t>(block_[0]);
            const int64_t bytes = block_.addresses[1] - block_.addresses[0];
            if (fills_units && n_ == kLatentKeys && address % 4 == 0 && bytes % 4 == 0 && equally_spaced(bytes)) {
                stride = bytes / 4;
                return reinterpret_cast<const float*>(block_[0]);
            }
        }
        stride = geometry_.key_stride;
        for (int64_t j = 0; j < kLatentKeys; ++j) {
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
        for (int64_t j = 1; j + 1 < kLatentKeys; ++j) differences |= (block_.addresses[j + 1] - block_.addresses[j]) ^ bytes;
        return differences == 0;
    }

    void hide(int64_t key, int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) scores_[key * rows_ + r] = -kInfinity;
    }

    // Scales the scores of a quantized cache.
    void scale_scores() {
        load_scales(call_.key_scales(sequence_, split_.kv_head), first_, n_, key_scales_);
        load_scales(call_.value_scales(sequence_, split_.kv_head), first_, n_, value_scales_);
        for (int64_t j = 0; j < n_; ++j)
            for (int64_t r = 0; r < rows_; r += Vec::kWidth) {
                float* at = scores_ + j * rows_ + r;
                store(at, load(at) * broadcast(key_scales_[j]));
            }
    }

    // Modifies scores row by row, as each row has its own modifiers.
    void score_mod() {
        float scores[kLatentKeys + Vec::kWidth];
        for (int64_t r = 0; r < num_rows_; ++r) {
            for (int64_t j = 0; j < n_; ++j) scores[j] = scores_[j * rows_ + r];
            modify_scores(score_row(call_, sequence_, row(r).token, row(r).head), scores, first_, n_);
            for (int64_t j = 0; j < n_; ++j) scores_[j * rows_ + r] = scores[j];
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
        const float* scores = scores_ + r;
        Vec highest = load(scores);
        for (int64_t j = 1; j < kLatentKeys; ++j) highest = maximum(highest, load(scores + j * rows_));
        const Vec old_max = load(row_max_ + r);
        if (reduce_max(select_less(old_max, highest, broadcast(1.0f), zero())) > 0.0f) online_max(r, highest);
        const Vec reference = ScoreUnits::reference(load(row_max_ + r));
        Vec sum = zero();
        auto weight = [&](int64_t j) __attribute__((always_inline)) {
            const Vec p = units_.template weight<!kPairs>(load(scores + j * rows_), reference);
            sum = sum + p;
            if constexpr (kQuantized<Stored>) return p * broadcast(j < n_ ? value_scales_[j] : 0.0f);
            return p;
        };
        for (int64_t j = 0; j < kLatentKeys; j += Unit::kElements) {
            if constexpr (kPairs) {
#ifdef FA_HAS_BF16_DOT
                const Vec first = weight(j), second = weight(j + 1);
                LatentProducts<Unit>::store_weights(weights_, j / 2, r, rows_, to_pairs(first, second));
#endif
            } else {
                store(weights_ + j * rows_ + r, weight(j));
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
                float* acc_o = acc_o_ + (r + i) * columns_;
                for (int64_t c = 0; c < columns_; c += Vec::kWidth) store(acc_o + c, load(acc_o + c) * broadcast(factor));
            }
            max = lanes[i];
        }
    }

    // Interleaves pairs of keys, column by column.
    void interleave_values(const Bfloat16* keys, int64_t stride) {
#ifdef FA_HAS_BF16_DOT
        constexpr int64_t kChunk = 2 * Vec::kWidth;
        for (int64_t j = 0; j < kLatentKeys; j += 2)
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
    const int64_t first_row_, num_rows_, rows_, columns_;
    float *queries_, *keys_, *scores_, *weights_, *values_;
    float *acc_o_, *row_max_, *row_sum_;  // results of the split, with room for whole vectors of rows
    KeyBlockRows<Stored> block_;  // this block and the next one
    int64_t first_, n_;           // keys of the block
    float key_scales_[kLatentKeys], value_scales_[kLatentKeys];
};

template <class Stored, class Unit>
static void decode_latent_split(const Call& call, const DecodeSplit& split, int64_t columns, float* scratch) {
    const int64_t rows = call.rows(call.sequences[split.sequence]);
    for (int64_t row = 0; row < rows; row += kLatentRows)
        LatentDecode<Stored, Unit>(call, split, row, smaller(kLatentRows, rows - row), columns, scratch).run();
}

}  // namespace FA_NAMESPACE
