// Copies tiles of a chunk to shared memory.
#pragma once

#include FA_ARCH_HEADER

#include "factors.cuh"
#include "numbers_in_shared.cuh"

namespace fastattention {

constexpr int kColumns = kHeaddimV;  // columns of v per CTA
constexpr bool kReversed = Config::reversed;  // for gradients, from later tokens to earlier ones

// The number of CTAs that divide the columns of v of a head.
FA_DEVICE int num_column_parts(const ChunkParams& p) { return (p.columns_v + kColumns - 1) / kColumns; }

// Copies 16 bytes, or zeros. There is no branch, so that products go on meanwhile.
FA_DEVICE void copy_128(uint32_t to, const void* from, bool valid) {
    if constexpr (Arch::kAsyncCopy) {
        copy_async_128(to, from, valid);
    } else {
        store_shared_128(to, valid ? load_global_128(from) : Words4{});
    }
}

// Copies contiguous floats. Team: the threads that copy.
template <class Team, int kCount>
FA_DEVICE void copy_numbers(const float* from, bool valid, uint32_t to) {
    constexpr int kPieces = kCount / 4;
#pragma unroll
    for (int i = 0; i < kPieces; i += Team::kThreads) {
        const int piece = i + Team::index();
        if (piece < kPieces) copy_128(to + piece * 16, from + piece * 4, valid);
    }
}

constexpr int kTrianglePitch = pitch_of<2>(kChunk), kTriangleBytes = kChunk * kTrianglePitch;

// Copies a square of a chunk. kTriangle: it is zero above the diagonal; elements above it are not read.
template <class Team, bool kTriangle = false>
FA_DEVICE void copy_square(const uint16_t* from, bool valid, uint32_t to) {
    constexpr int kPieces = kChunk / 8, kRowStep = Team::kThreads / kPieces;
    const int first_row = Team::index() / kPieces, column = Team::index() % kPieces * 8;
    from += first_row * kChunk + column;
    to += first_row * kTrianglePitch + column * 2;
#pragma unroll
    for (int row = 0; row < kChunk; row += kRowStep)
        if (kChunk % kRowStep == 0 || first_row + row < kChunk)
            copy_128(to + row * kTrianglePitch, from + row * kChunk, valid && (!kTriangle || column <= first_row + row));
}

// Copies the transpose of a square that is zero above the diagonal.
template <class Team>
FA_DEVICE void copy_triangle_transposed(const uint16_t* from, uint32_t to) {
    for (int piece = Team::index(); piece < kChunk * kChunk / 16; piece += Team::kThreads) {
        const int row = piece / (kChunk / 8) * 2, column = piece % (kChunk / 8) * 8;
        Words4 rows[2] = {};
#pragma unroll
        for (int i = 0; i < 2; ++i)
            if (column <= row + i) rows[i] = load_global_128(from + (row + i) * kChunk + column);
#pragma unroll
        for (int j = 0; j < 8; ++j)
            store_shared_32(to + (column + j) * kTrianglePitch + row * 2,
                            permute_bytes(rows[0].word[j / 2], rows[1].word[j / 2], j % 2 ? 0x7632 : 0x5410));
    }
}

// Where the updates of a slot are in scratch, from a column of v on. Eight columns of all tokens of the chunk are contiguous,
// then come the next eight: so a warp of chain.cuh, which has few columns, writes whole lines.
FA_DEVICE int64_t updates_at(const ChunkParams& p, int64_t slot, int column) {
    return (slot * p.columns_v + column) * kChunk;
}

// Copies kWidth columns of them, a row for each token; zeros beyond `columns`.
template <class Team, int kWidth>
FA_DEVICE void copy_updates(const uint16_t* from, int columns, uint32_t to) {
    constexpr int kPieces = kChunk * kWidth / 8;
#pragma unroll
    for (int i = 0; i < kPieces; i += Team::kThreads) {
        const int piece = i + Team::index(), token = piece % kChunk, column = piece / kChunk * 8;
        if (kPieces % Team::kThreads == 0 || piece < kPieces)
            copy_128(to + token * pitch_of<2>(kWidth) + column * 2, from + column * kChunk + token * 8, column < columns);
    }
}

FA_DEVICE float load_operand(uint32_t at) {
    return Operand::widen(static_cast<uint16_t>(load_shared_32(at / 4 * 4) >> at % 4 * 8));
}

// Sums products of operands in shared memory, one by one. Matrix products multiply elements above the diagonal of a
// triangle too: where one is not finite, earlier tokens must not get it. stride: bytes between the second operands.
FA_DEVICE float sum_one_by_one(int count, uint32_t first, uint32_t second, int stride) {
    float sum = 0.0f;
#pragma unroll 1
    for (int i = 0; i < count; ++i) sum += load_operand(first + i * 2) * load_operand(second + i * stride);
    return sum;
}

template <class Copy>
FA_DEVICE void copy_tile(Copy copy, int first_row, uint32_t to) {
    copy.begin(first_row, to);
    copy.finish(to);
}

// Rows of q or k of a sequence.
struct TokenRows {
    const uint16_t* base;
    int64_t stride_batch;
    int stride_row;
    int64_t stride_head;
};

// The rows of a head, starting at a column. With a gate for every key dimension they are in scratch, kStride elements each
// and kRows of each chunk.
template <int kStride, int kRows = kChunk>
FA_DEVICE SourceRows<uint16_t, false> token_source(const ChunkParams& p, const Sequence& sequence, int head,
                                                   const TokenRows& rows, const uint16_t* scaled, int column) {
    if constexpr (kGatePerKey)
        return {scaled + slot_of(p, sequence, head) * (kRows * kStride) + column, kStride, sequence.num_chunks() * kRows,
                kStride - column};
    const int64_t offset = sequence.offset(rows.stride_batch, rows.stride_row, rows.stride_head, head / p.group_size);
    return {rows.base + offset + column, rows.stride_row, sequence.length, p.columns_k - column};
}

}  // namespace fastattention
