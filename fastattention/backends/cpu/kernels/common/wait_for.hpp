// Lets a kernel wait for another thread. It is separate from thread_pool.hpp, whose inline functions must not be compiled
// for several instruction sets.
#pragma once

#include <cstdint>

namespace fastattention {

// Waits until another thread has stored `wanted`. What that thread wrote before is then visible.
void wait_for(const int32_t* number, int32_t wanted);

}  // namespace fastattention
