// What a CTA of scan.cuh has in shared memory: the tiles of a chunk, which it copies there, and what its warps leave for each
// other.
#pragma once

#include FA_ARCH_HEADER

#include "factors.cuh"

namespace fastattention {

constexpr bool kGatePerKey = FA_GATE_PER_KEY;
static_assert(!(kDeltaRule && kGatePerKey), "the delta rule has one gate a head");

constexpr int kColumns = kHeaddimV;  // of v, of a CTA

// 16 bytes, or zeros. What copies ask for has no branches: products go on meanwhile.
FA_DEVICE void copy_128(uint32_t to, const void* from, bool valid) {
    if constexpr (Arch::kAsyncCopy) {
        copy_async_128(to, from, valid);
    } else {
        store_shared_128(to, valid ? load_global_128(from) : Words4{});
    }
}

// Copies numbers that lie in order.
template <int kCount>
class NumbersCopy {
public:
    FA_DEVICE explicit NumbersCopy(const float* from) : from_(from) {}

    FA_DEVICE void begin(int chunk, bool valid, uint32_t to) const {
        constexpr int kPieces = kCount / 4;
        const float* from = from_ + static_cast<int64_t>(chunk) * kCount;
#pragma unroll
        for (int i = 0; i < kPieces; i += kThreads) {
            const int piece = i + thread_index();
            if (piece < kPieces) copy_128(to + piece * 16, from + piece * 4, valid);
        }
    }

private:
    const float* const from_;
};

// Copies squares of a chunk that are zero above the diagonal; what is above it is not read.
class TriangleCopy {
public:
    static constexpr int kPitch = pitch_of<2>(kChunk), kBytes = kChunk * kPitch;

    // from: of the first chunk.
    FA_DEVICE explicit TriangleCopy(const uint16_t* from) : from_(from) {}

    FA_DEVICE void begin(int chunk, bool valid, uint32_t to) const {
        constexpr int kPieces = kChunk / 8, kRowStep = kThreads / kPieces;
        const int first_row = thread_index() / kPieces, column = thread_index() % kPieces * 8;
        const uint16_t* from = from_ + static_cast<int64_t>(chunk) * (kChunk * kChunk) + first_row * kChunk + column;
        to += first_row * kPitch + column * 2;
#pragma unroll
        for (int row = 0; row < kChunk; row += kRowStep)
            if (kChunk % kRowStep == 0 || first_row + row < kChunk)
                copy_128(to + row * kPitch, from + row * kChunk, valid && column <= first_row + row);
    }

private:
    const uint16_t* const from_;
};

// What a chunk needs in shared memory.
class ChunkTiles {
    using TokenCopy = TileCopy<Arch, WholeCta, uint16_t, false, kChunk, kHeaddim>;
    using ValueCopy = TileCopy<Arch, WholeCta, uint16_t, false, kChunk, kColumns>;
    using FactorCopy = NumbersCopy<kGatePerKey ? kHeaddim : kFactors>;
    static constexpr int kQueries = TokenCopy::kBytes, kScores = 2 * TokenCopy::kBytes,
                         kInverse = kScores + TriangleCopy::kBytes,
                         kValues = kInverse + (kDeltaRule ? TriangleCopy::kBytes : 0),
                         kFactorsAt = kValues + ValueCopy::kBytes;

public:
    static constexpr int kTokenPitch = TokenCopy::kPitch, kSquarePitch = TriangleCopy::kPitch,
                         kValuePitch = ValueCopy::kPitch;
    static constexpr int kBytes = kFactorsAt + (kGatePerKey ? kHeaddim : kFactors) * 4;

    FA_DEVICE ChunkTiles(const ChunkParams& p, const Sequence& sequence, int head, int column)
        : keys_(tokens(p, sequence, head, p.k, p.k_scaled, p.k_stride_batch, p.k_stride_row, p.k_stride_head)),
          queries_(tokens(p, sequence, head, p.q, p.q_scaled, p.q_stride_batch, p.q_stride_row, p.q_stride_head)),
          scores_(p.scores + slot_of(p, sequence, head) * (kChunk * kChunk)),
          inverse_(p.inverse + slot_of(p, sequence, head) * (kChunk * kChunk)),
          values_({p.v + sequence.offset(p.v_stride_batch, p.v_stride_row, p.v_stride_head, head) + column, p.v_stride_row,
                   sequence.length, p.columns_v - column}),
          factors_(p.factors + slot_of(p, sequence, head) * (kGatePerKey ? kHeaddim : kFactors)),
          length_(sequence.length) {}

    // Of a chunk behind the last nothing is read.
    FA_DEVICE void begin(int chunk, uint32_t to) {
        const int first = chunk * kChunk;
        const bool valid = first < length_;
        copy(keys_, first, to);
        copy(queries_, first, to + kQueries);
        scores_.begin(chunk, valid, to + kScores);
        if constexpr (kDeltaRule) inverse_.begin(chunk, valid, to + kInverse);
        copy(values_, first, to + kValues);
        factors_.begin(chunk, valid, to + kFactorsAt);
    }

    static FA_DEVICE uint32_t keys(uint32_t tiles) { return tiles; }
    static FA_DEVICE uint32_t queries(uint32_t tiles) { return tiles + kQueries; }
    static FA_DEVICE uint32_t scores(uint32_t tiles) { return tiles + kScores; }
    static FA_DEVICE uint32_t inverse(uint32_t tiles) { return tiles + kInverse; }
    static FA_DEVICE uint32_t values(uint32_t tiles) { return tiles + kValues; }
    static FA_DEVICE uint32_t factor(uint32_t tiles, int at) { return tiles + kFactorsAt + at * 4; }

private:
    // Rows of q or k; with gates of keys what scratch holds instead.
    static FA_DEVICE typename TokenCopy::Source tokens(const ChunkParams& p, const Sequence& sequence, int head,
                                                       const uint16_t* base, const uint16_t* scaled, int64_t stride_batch,
                                                       int stride_row, int64_t stride_head) {
        if constexpr (kGatePerKey)
            return {scaled + slot_of(p, sequence, head) * (kChunk * kHeaddim), kHeaddim, sequence.num_chunks() * kChunk,
                    kHeaddim};
        return {base + sequence.offset(stride_batch, stride_row, stride_head, head / p.group_size), stride_row,
                sequence.length, p.columns_k};
    }

    template <class Copy>
    static FA_DEVICE void copy(Copy& rows, int first, uint32_t to) {
        rows.begin(first, to);
        rows.finish(to);
    }

    TokenCopy keys_, queries_;
    TriangleCopy scores_, inverse_;
    ValueCopy values_;
    FactorCopy factors_;
    const int length_;
};

// What warps leave for each other behind the tiles: rows are columns of v. Results wait here for the next chunk to write them,
// or in the place of values where there is one stage of tiles.
class Exchange {
public:
    static constexpr int kStatePitch = ChunkTiles::kTokenPitch, kTokenPitch = ChunkTiles::kSquarePitch,
                         kOutPitch = ChunkTiles::kValuePitch;

private:
    static constexpr int kUpdates = kStages * ChunkTiles::kBytes + kColumns * kStatePitch,
                         kToState = kUpdates + (kGatePerKey ? 0 : kColumns * kTokenPitch),
                         kRest = kToState + kColumns * kTokenPitch, kOut = kRest + (kDeltaRule ? kColumns * kTokenPitch : 0);

public:
    static constexpr int kBytes = kOut + (kStages > 1 ? kChunk * kOutPitch : 0);

    FA_DEVICE uint32_t state() const { return at_ + kStages * ChunkTiles::kBytes; }
    FA_DEVICE uint32_t updates() const { return at_ + kUpdates; }
    // Likewise, as the state takes them.
    FA_DEVICE uint32_t to_state() const { return at_ + kToState; }
    // What values are more than the state before the chunk holds.
    FA_DEVICE uint32_t rest() const { return at_ + kRest; }
    FA_DEVICE uint32_t out(uint32_t tiles) const { return kStages > 1 ? at_ + kOut : ChunkTiles::values(tiles); }

private:
    const uint32_t at_ = shared_memory();
};
static_assert(Exchange::kBytes == FA_SHARED_BYTES, "chunk_config.py computes the same");

}  // namespace fastattention
