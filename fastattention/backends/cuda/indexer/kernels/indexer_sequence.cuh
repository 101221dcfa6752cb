// Sequences of a call of the indexer: which rows of q are theirs, and how many keys each row sees.
#pragma once

#include "indexer_params.h"
#include "intrinsics.cuh"

namespace fastattention {

class IndexerSequence {
public:
    FA_DEVICE IndexerSequence(const IndexerParams& p, int index)
        : index_(index), first_row_(row_of(p, index)), end_row_(row_of(p, index + 1)), causal_(p.causal) {
        length_ = p.most_keys;
        if (p.cu_seqlens_k != nullptr) length_ = p.cu_seqlens_k[index + 1] - p.cu_seqlens_k[index];
        // A length that the host has not checked must not lead behind a sequence's memory.
        if (p.seqused_k != nullptr && p.seqused_k[index] < length_) length_ = p.seqused_k[index];
    }

    FA_DEVICE int index() const { return index_; }
    FA_DEVICE int end_row() const { return end_row_; }
    FA_DEVICE bool has(int row) const { return first_row_ <= row && row < end_row_; }
    // The keys that a row sees are the first ones. Rows after the last sequence, as in CUDA graphs of batches that vary,
    // see none.
    FA_DEVICE int seen_by(int row) const {
        const int later = end_row_ - 1 - row, seen = causal_ ? length_ - later : length_;
        return later < 0 || seen < 0 ? 0 : seen;
    }

private:
    static FA_DEVICE int row_of(const IndexerParams& p, int index) {
        return p.cu_seqlens_q == nullptr ? index * p.seqlen_q : p.cu_seqlens_q[index];
    }

    int index_, first_row_, end_row_, length_;
    bool causal_;
};

// The index of the sequence that has a row of q.
FA_DEVICE int sequence_of_row(const IndexerParams& p, int row) {
    if (p.cu_seqlens_q == nullptr) return row / p.seqlen_q;
    int low = 0, high = p.batch_size;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        (p.cu_seqlens_q[middle] <= row ? low : high) = middle;
    }
    return low;
}

}  // namespace fastattention
