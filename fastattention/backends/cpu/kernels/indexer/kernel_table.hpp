// The tasks that indexer.cpp passes to the kernels of an instruction set, and the table of these kernels.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "indexer/params.h"

namespace fastattention {

// A task scores some neighbouring keys for some neighbouring queries of one sequence.
struct IndexerTask {
    int64_t sequence;
    int64_t first_row, num_rows;  // rows of q
    int64_t first_key, end_key;
    float* scores;  // of the first row and key 0
    int64_t stride;  // from the scores of a row to those of the next
};

// Rows of a task, at most: a panel of keys is packed once for all of them.
constexpr int64_t kIndexerRows = 8;

// The kernels of an instruction set.
struct IndexerKernels {
    void (*score)(const FaIndexerParams& params, const IndexerTask& task, float* scratch);
    int64_t (*scratch_floats)(const FaIndexerParams& params);  // working memory of a task
};

}  // namespace fastattention
