// Chunks of tokens of a sequence: where they begin, and their slots of scratch memory.
#pragma once

#include "chunk_params.h"
#include "intrinsics.cuh"

namespace fastattention {

constexpr int kChunk = Config::chunk;  // tokens of a chunk

// Added to the squared length of a key or query.
constexpr float kLengthEpsilon = 1e-6f;  // as in linear/reference.py

// A sequence of tokens. Its last chunk may have fewer tokens than the others, but its slot of scratch is as large.
struct Sequence {
    int batch;          // row of the batch
    int first, length;  // its tokens in that row
    int first_slot;

    FA_DEVICE int num_chunks() const { return (length + kChunk - 1) / kChunk; }

    // The offset of the first token of a head, in elements.
    FA_DEVICE int64_t offset(int64_t stride_batch, int64_t stride_row, int64_t stride_head, int head) const {
        return batch * stride_batch + first * stride_row + head * stride_head;
    }
};

// The first slot of a varlen sequence is found without a look at the other sequences: the chunks of all tokens before it,
// plus one for each sequence before it, are always enough.
FA_DEVICE Sequence sequence_at(const ChunkParams& p, int index) {
    if (p.cu_seqlens == nullptr) return {index, 0, p.seqlen, index * ((p.seqlen + kChunk - 1) / kChunk)};
    const int first = p.cu_seqlens[index];
    return {0, first, p.cu_seqlens[index + 1] - first, first / kChunk + index};
}

// The sequence of a slot: the last one that begins at the slot or before it.
FA_DEVICE Sequence sequence_of_slot(const ChunkParams& p, int slot) {
    int low = 0, high = p.num_sequences;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        (sequence_at(p, middle).first_slot <= slot ? low : high) = middle;
    }
    return sequence_at(p, low);
}

// The first slot of a sequence among those of a head.
FA_DEVICE int64_t slot_of(const ChunkParams& p, const Sequence& sequence, int head) {
    return static_cast<int64_t>(head) * p.num_slots + sequence.first_slot;
}

}  // namespace fastattention
