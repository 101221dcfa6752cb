// Rows of tensors: conversion from and to float32, padding, transposition and prefetching.
#pragma once

namespace FA_NAMESPACE {

// Floats of padding between rows of tiles and matrices in working memory. Otherwise all rows would be in the same cache sets.
static constexpr int64_t kRowPadding = 16;

// Access to a whole vector of a row, and to the columns after the last whole vector.
struct WholeVector {
    template <class Element>
    __attribute__((always_inline)) Vec load(const Element* from) const {
        return FA_NAMESPACE::load(from);
    }
    template <class Element>
    __attribute__((always_inline)) void store(Element* to, Vec x) const {
        FA_NAMESPACE::store(to, x);
    }
};
struct PartOfVector {
    int used;

    template <class Element>
    __attribute__((always_inline)) Vec load(const Element* from) const {
        return load_partial(from, used);
    }
    template <class Element>
    __attribute__((always_inline)) void store(Element* to, Vec x) const {
        store_partial(to, x, used);
    }
};

// to[0..n) = from[0..n); `to` is padded with zeros up to `padded`.
template <class Element>
FA_INLINE void widen_row(const Element* from, float* to, int64_t n, int64_t padded) {
    int64_t i = 0;
    for (; i + Vec::kWidth <= n; i += Vec::kWidth) store(to + i, load(from + i));
    if (i < n) {
        float lanes[Vec::kWidth];
        store(lanes, load_partial(from + i, static_cast<int>(n - i)));
        for (int lane = 0; i < n; ++i, ++lane) to[i] = lanes[lane];
    }
    for (; i < padded; ++i) to[i] = 0.0f;
}

template <class Element>
FA_INLINE void narrow_row(const float* from, Element* to, int64_t n) {
    int64_t i = 0;
    for (; i + Vec::kWidth <= n; i += Vec::kWidth) store(to + i, load(from + i));
    if (i < n) store_partial(to + i, load_partial(from + i, static_cast<int>(n - i)), static_cast<int>(n - i));
}

// Converts n elements from index `at` on, whose dtype is known at run time, to float.
FA_INLINE void widen_any(const void* from, int64_t dtype, int64_t at, float* to, int64_t n, int64_t padded) {
    if (dtype == FA_FLOAT32) return widen_row(static_cast<const float*>(from) + at, to, n, padded);
    if (dtype == FA_FLOAT16) return widen_row(static_cast<const Float16*>(from) + at, to, n, padded);
    widen_row(static_cast<const Bfloat16*>(from) + at, to, n, padded);
}

// Converts n floats to elements from index `at` on, whose dtype is known at run time.
FA_INLINE void narrow_any(const float* from, void* to, int64_t dtype, int64_t at, int64_t n) {
    if (dtype == FA_FLOAT32) return narrow_row(from, static_cast<float*>(to) + at, n);
    if (dtype == FA_FLOAT16) return narrow_row(from, static_cast<Float16*>(to) + at, n);
    narrow_row(from, static_cast<Bfloat16*>(to) + at, n);
}

// to[0..n) = from[0..n) * factor; whole vectors of `from` are read.
template <class Element>
FA_INLINE void store_scaled(const float* from, Vec factor, Element* to, int64_t n) {
    int64_t i = 0;
    for (; i + Vec::kWidth <= n; i += Vec::kWidth) store(to + i, load(from + i) * factor);
    if (i < n) store_partial(to + i, load(from + i) * factor, static_cast<int>(n - i));
}

// Interleaves n elements of two rows to pairs.
FA_INLINE void pair_row(const Bfloat16* first, const Bfloat16* second, float* pairs, int64_t n) {
    auto* to = reinterpret_cast<uint32_t*>(pairs);
    for (int64_t c = 0; c < n; ++c) to[c] = first[c].bits | static_cast<uint32_t>(second[c].bits) << 16;
}

FA_INLINE void prefetch_bytes(const void* data, int64_t bytes) {
    for (int64_t byte = 0; byte < bytes; byte += 64) prefetch(static_cast<const char*>(data) + byte);
}

// to (columns, rows) = from (rows, columns), of 32-bit units; rows and columns in whole vectors.
static void transpose_units(const float* from, int64_t from_stride, float* to, int64_t to_stride, int64_t rows,
                            int64_t columns) {
    float block[Vec::kWidth * Vec::kWidth];
    for (int64_t i = 0; i < rows; i += Vec::kWidth)
        for (int64_t j = 0; j < columns; j += Vec::kWidth) {
            for (int64_t k = 0; k < Vec::kWidth; ++k) store(block + k * Vec::kWidth, load(from + (i + k) * from_stride + j));
            transpose_square(block, Vec::kWidth);
            for (int64_t k = 0; k < Vec::kWidth; ++k) store(to + (j + k) * to_stride + i, load(block + k * Vec::kWidth));
        }
}

}  // namespace FA_NAMESPACE
