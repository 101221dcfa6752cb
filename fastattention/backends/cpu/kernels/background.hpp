// A job of the pool that gives way: it goes on while nothing else needs the processor's attention.
#pragma once

#include "thread_pool.hpp"

namespace fastattention {

// Begins to call task(context, index, slot) for every index in [0, count), on up to num_threads threads, and returns at
// once. A job that was begun before is stopped.
void start_background(int64_t count, int num_threads, Task task, void* context);

// Leaves out what of the job was not begun yet, and returns when nothing of it runs any more. Quick when there is none.
void stop_background();

}  // namespace fastattention
