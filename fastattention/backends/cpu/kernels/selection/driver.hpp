// The slots of the keys that indices name.
#pragma once

#include "selection/params.h"

namespace fastattention {

// Returns -1, or the place among indices of one that is no block of its sequence. Of several it is the first.
int64_t select_slots(const FaSelectionParams& params);

}  // namespace fastattention
