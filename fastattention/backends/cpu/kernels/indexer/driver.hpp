// Plans a call of the indexer and runs it on the thread pool with the kernels of an instruction set.
#pragma once

#include "indexer/kernel_table.hpp"

namespace fastattention {

// Returns false if there is no working memory, and throws nothing.
bool index_keys(const IndexerKernels& kernels, const FaIndexerParams& params);

}  // namespace fastattention
