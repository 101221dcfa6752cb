// The library of one variant of chunked linear attention: the macros of a ScanConfig say which.
#include "scan.cuh"

#include "launch.hpp"

FA_EMULATED(emulate_linear_scan, fastattention_linear_scan, ChunkParams, fastattention::kWarps,
            fastattention::Exchange::kBytes)
