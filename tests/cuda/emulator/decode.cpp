// The library of one variant of the decode kernel, and of the merge of its partial results.
#include "decode.cuh"

#include "launch.hpp"

FA_EMULATED(emulate_decode, fastattention_decode, AttentionParams)
FA_EMULATED(emulate_combine, fastattention_combine, AttentionParams)
