// Lets a kernel wait for another thread. Apart from thread_pool.hpp, whose inline functions must not be compiled for several
// instruction sets.
#pragma once

#include <cstdint>

namespace fastattention {

// Waits for another thread to store `wanted`, and for what that thread wrote before.
void wait_for(const int32_t* number, int32_t wanted);

}  // namespace fastattention
