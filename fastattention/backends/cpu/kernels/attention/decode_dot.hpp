// The arithmetic of a decode: loads of keys and values, multiply-adds, and the layout of the other operands.
#pragma once

namespace FA_NAMESPACE {

// Elements widened to floats, one vector at a time.
template <class Element>
struct Wide {
    using Stored = Element;
    using Grouped = Wide;                         // the class for more than four rows
    static constexpr int kColumnStep = Vec::kWidth;  // columns of a row of output are padded to a multiple of this
    static constexpr int kChunk = Vec::kWidth;  // elements per step
    static constexpr int kKeysPerStep = 1;      // keys whose values a step multiplies
    static constexpr int kColumnVectors = 1;    // accumulators of one chunk of columns
    static constexpr bool kPrecise = true;      // whether exponentials are precise
    static constexpr bool kRuns = false;        // has score_run and accumulate_run, for equally spaced rows
    // Keys of a block, keys by which prefetching runs ahead, and keys of a block of heads that take turns.
    static constexpr int64_t kBlock = kBlockKeys, kAhead = kAheadKeys;
    static constexpr int64_t kTurn = kQuantized<Element> ? kQuantizedTurnKeys : kTurnKeys;
    FA_INLINE Vec load_chunk(const Element* p) { return load(p); }
    FA_INLINE Vec load_chunk_partial(const Element* p, int n) { return load_partial(p, n); }
    // Add the product of a key with a query, and of columns of values with a probability: vector i of kColumnVectors.
    FA_INLINE Vec add_product(Vec acc, Vec key, Vec query) { return fma(key, query, acc); }
    FA_INLINE Vec multiply_add(Vec acc, Vec a, Vec b, int) { return fma(a, b, acc); }
    FA_INLINE Vec reduce(const Vec* acc) { return reduce_columns(acc); }

    // Stores query g of a group, n elements, in the layout for steps; returns the unit of its products.
    template <int kGroup>
    FA_INLINE float store_query(const float* query, int64_t n, float* queries, int g, int64_t stride) {
        narrow_row(query, queries + g * stride, n);
        return 1.0f;
    }

    // Makes the operand that a step multiplies with probabilities from the same columns of its keys' values.
    FA_INLINE void combine(const Vec* values, Vec* columns) { columns[0] = values[0]; }
    FA_INLINE void restore_order(const float* from, float* to) { store(to, load(from)); }
    template <int kGroup>
    FA_INLINE void store_probabilities(float* to, int64_t i, Vec p) {
        store(to + i, p);
    }
    // Called once a block has all probabilities. units[g]: the unit of the probabilities of row g.
    template <int kGroup>
    FA_INLINE void finish_probabilities(float*, int64_t, float*) {}

    // Called around the work of a task.
    template <int kGroup>
    FA_INLINE void begin() {}
    FA_INLINE void end() {}

    // Begin the sums of a block, and add them to acc_o.
    FA_INLINE Vec begin_sum(const float* acc_o) { return load(acc_o); }
    FA_INLINE Vec end_sum(Vec acc, const float*, float) { return acc; }
};

// For more than four rows, whose queries WidePairs would widen more often than the keys.
struct WideBeside : Wide<Bfloat16> {
    static constexpr int kColumnStep = 2 * Vec::kWidth;  // as in WidePairs, which writes rows of the same results
};

// bfloat16 without a dot-product instruction: a shift and a mask widen two vectors at once, while a widening load takes a
// shuffle for each.
struct WidePairs : Wide<Bfloat16> {
    using Grouped = WideBeside;
    static constexpr int kColumnStep = 2 * Vec::kWidth;
    static constexpr int kChunk = 2 * Vec::kWidth;
    static constexpr int kColumnVectors = 2;
    FA_INLINE Vec load_chunk(const Bfloat16* p) { return load_pairs(p); }
    FA_INLINE Vec load_chunk_partial(const Bfloat16* p, int n) { return load_pairs_partial(p, n); }
    FA_INLINE Vec add_product(Vec acc, Vec key, Vec query) {
        Vec keys[2], queries[2];
        widen_pairs(key, keys[0], keys[1]);
        widen_pairs(query, queries[0], queries[1]);
        return fma(keys[1], queries[1], fma(keys[0], queries[0], acc));
    }
    template <int kGroup>
    FA_INLINE float store_query(const float* query, int64_t n, float* queries, int g, int64_t stride) {
        narrow_row(query, reinterpret_cast<Bfloat16*>(queries + g * stride), n);
        return 1.0f;
    }
    FA_INLINE void combine(const Vec* values, Vec* columns) { widen_pairs(values[0], columns[0], columns[1]); }
    FA_INLINE void restore_order(const float* from, float* to) {
        store_interleaved(to, load(from), load(from + Vec::kWidth));
    }
};

#ifdef FA_HAS_BF16_DOT
// bfloat16 by the dot-product instruction for pairs. Columns come out interleaved and are put in order when a split is done.
struct Paired : Wide<float> {
    using Stored = Bfloat16;
    using Grouped = Paired;
    static constexpr int kColumnStep = 2 * Vec::kWidth;
    static constexpr int kChunk = 2 * Vec::kWidth;
    static constexpr int kKeysPerStep = 2;
    static constexpr int kColumnVectors = 2;
    static constexpr bool kPrecise = false;
    FA_INLINE Vec load_chunk(const Bfloat16* p) { return load_pairs(p); }
    FA_INLINE Vec load_chunk_partial(const Bfloat16* p, int n) { return load_pairs_partial(p, n); }
    FA_INLINE Vec add_product(Vec acc, Vec key, Vec query) { return dot_pairs(acc, key, query); }
    FA_INLINE Vec multiply_add(Vec acc, Vec a, Vec b, int) { return dot_pairs(acc, a, b); }
    template <int kGroup>
    FA_INLINE float store_query(const float* query, int64_t n, float* queries, int g, int64_t stride) {
        narrow_row(query, reinterpret_cast<Bfloat16*>(queries + g * stride), n);
        return 1.0f;
    }

    FA_INLINE void combine(const Vec* values, Vec* columns) {
        columns[0] = interleave_low(values[0], values[1]);
        columns[1] = interleave_high(values[0], values[1]);
    }
    FA_INLINE void restore_order(const float* from, float* to) {
        Vec first, second;
        restore_columns(load(from), load(from + Vec::kWidth), first, second);
        store(to, first);
        store(to + Vec::kWidth, second);
    }
    template <int kGroup>
    FA_INLINE void store_probabilities(float* to, int64_t i, Vec p) {
        store_key_pairs<kGroup>(reinterpret_cast<uint16_t*>(to), i, to_bits16(p, Bfloat16{}));
    }
};
#endif

#ifdef FA_HAS_HALF_DOT
// float16 by instructions that widen the products of halves. Probabilities are rounded to float16.
struct Halves : Wide<Float16> {
    using Grouped = Halves;
    static constexpr int kColumnStep = 2 * Vec::kWidth;
    static constexpr int kChunk = 2 * Vec::kWidth;
    static constexpr int kColumnVectors = 2;
    FA_INLINE Vec load_chunk(const Float16* p) { return load_pairs(p); }
    FA_INLINE Vec load_chunk_partial(const Float16* p, int n) { return load_pairs_partial(p, n); }
    FA_INLINE Vec add_product(Vec acc, Vec key, Vec query) {
        return multiply_halves(multiply_halves(acc, key, query, 0), key, query, 1);
    }
    FA_INLINE Vec multiply_add(Vec acc, Vec a, Vec b, int i) { return multiply_halves(acc, a, b, i); }
    template <int kGroup>
    FA_INLINE float store_query(const float* query, int64_t n, float* queries, int g, int64_t stride) {
        narrow_row(query, reinterpret_cast<Float16*>(queries + g * stride), n);
        return 1.0f;
    }
    FA_INLINE void combine(const Vec* values, Vec* columns) { columns[0] = columns[1] = values[0]; }
    FA_INLINE void restore_order(const float* from, float* to) { memcpy(to, from, kChunk * sizeof(float)); }
    template <int kGroup>
    FA_INLINE void store_probabilities(float* to, int64_t i, Vec p) {
        store(to + i, twice(to_bits16(p, Float16{})));
    }
};
#endif

#ifdef FA_HAS_WORDS
struct FixedPointTiles;

// int8 as pairs of 16-bit integers, with queries and probabilities in 16-bit fixed point: 15 bits relative to the largest
// element of a query, and to the largest of a row's probabilities (times the scales of the values) in a block. Products and
// sums are exact: 32 bits hold sums over 512 elements, and over the 128 keys of a block. Queries with more elements are
// quantized more coarsely.
struct FixedPoint : Wide<Int8> {
#ifdef FA_HAS_AMX
    using Grouped = FixedPointTiles;
    static constexpr int kColumnStep = 64;
#else
    using Grouped = FixedPoint;
    static constexpr int kColumnStep = 2 * Vec::kWidth;
#endif
    static constexpr int kChunk = 2 * Vec::kWidth;
    static constexpr int kKeysPerStep = 2;
    static constexpr int kColumnVectors = 2;
    static constexpr float kLargestWord = 32767.0f;
    FA_INLINE Vec load_chunk(const Int8* p) { return load_words(p); }
    FA_INLINE Vec load_chunk_partial(const Int8* p, int n) { return load_words_partial(p, n); }
    FA_INLINE Vec add_product(Vec acc, Vec key, Vec query) { return dot_words(acc, key, query); }
    FA_INLINE Vec multiply_add(Vec acc, Vec a, Vec b, int) { return multiply_word_pairs(acc, a, b); }
    FA_INLINE Vec reduce(const Vec* acc) { return reduce_integer_columns(acc); }

    template <int kGroup>
    FA_INLINE float store_query(const float* query, int64_t n, float* queries, int g, int64_t stride) {
        float unit;
        const Vec factor = fixed_point(query, n, largest_of_query(kLargestWord, n), unit);
        auto* to = reinterpret_cast<uint16_t*>(queries + g * stride);
        for (int64_t i = 0; i < n; i += Vec::kWidth) store_words(to + i, round_words(load(query + i) * factor));
        return unit;
    }

    FA_INLINE void combine(const Vec* values, Vec* columns) { pair_words(values[0], values[1], columns[0], columns[1]); }
    FA_INLINE void restore_order(const float* from, float* to) {
        Vec first, second;
        restore_word_columns(load(from), load(from + Vec::kWidth), first, second);
        store(to, first);
        store(to + Vec::kWidth, second);
    }

    // Works in place: writes never overtake reads.
    template <int kGroup>
    FA_INLINE void finish_probabilities(float* probabilities, int64_t n, float* units) {
        float factors[Vec::kWidth];
        fixed_point_rows<kGroup>(probabilities, n, kLargestWord, units, factors);
        for (int64_t i = 0; i < n; i += Vec::kWidth)
            store_key_pairs<kGroup>(reinterpret_cast<uint16_t*>(probabilities), i,
                                    round_words(load(probabilities + i) * load(factors)));
    }

    FA_INLINE Vec begin_sum(const float*) { return zero(); }
    FA_INLINE Vec end_sum(Vec acc, const float* acc_o, float unit) {
        return fma(integers_to_floats(acc), broadcast(unit), load(acc_o));
    }

protected:
    // The largest word of a query of n elements such that its product with any int8 key fits 32 bits.
    FA_INLINE float largest_of_query(float largest_word, int64_t n) {
        const float fitting = static_cast<float>(int64_t{INT32_MAX} / (128 * n));
        return fitting < largest_word ? fitting : largest_word;
    }

    // Returns the factor that turns x[0..n) into words of at most `largest_word`. unit: the value of a word of 1, NaN if an
    // element is not finite.
    FA_INLINE Vec fixed_point(const float* x, int64_t n, float largest_word, float& unit) {
        float factors[Vec::kWidth];
        fixed_point_rows<1>(x, n, largest_word, &unit, factors);
        return load(factors);
    }

    // The same for kGroup rows side by side; factors[i] is the factor of row i % kGroup.
    template <int kGroup>
    FA_INLINE void fixed_point_rows(const float* x, int64_t n, float largest_word, float* units, float* factors) {
        Vec highest = zero(), spoiled = zero();
        for (int64_t i = 0; i < n; i += Vec::kWidth) {
            highest = maximum(highest, absolute(load(x + i)));
            spoiled = fma(load(x + i), zero(), spoiled);  // NaN for infinities and NaN
        }
        float lanes[Vec::kWidth], bad[Vec::kWidth];
        store(lanes, highest);
        store(bad, spoiled);
        for (int g = 0; g < kGroup; ++g) {
            float largest = 0.0f, row_bad = 0.0f;
            for (int i = g; i < Vec::kWidth; i += kGroup) {
                largest = lanes[i] > largest ? lanes[i] : largest;
                row_bad += bad[i];
            }
            units[g] = largest / largest_word + row_bad;
            // The factor is finite even if the largest is 0 or nearly so.
            const float factor = largest_word / largest < kLargest ? largest_word / largest : kLargest;
            for (int i = g; i < Vec::kWidth; i += kGroup) factors[i] = factor;
        }
    }
};
#endif

}  // namespace FA_NAMESPACE
