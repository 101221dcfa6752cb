// Page faults of results. Heads lie side by side in a token's row, so that threads with different heads write to the same
// pages. Where these are fresh, all of them fault at once, and all but one in vain.
#pragma once

#include <cstdint>

namespace fastattention {

// Makes the system provide the pages of memory that threads are about to write, each page once. Contents stay. Nothing
// happens where it would not pay, or where the system cannot do it.
void provide_pages(void* memory, int64_t bytes, int num_threads);

}  // namespace fastattention
