// The library of one variant of the kernel that finds the slots of selected keys.
#include "select_slots.cuh"

#include "launch.hpp"

FA_EMULATED(emulate_select_slots, fastattention_select_slots, SelectionParams)
