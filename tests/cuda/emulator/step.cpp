// The library of one variant of the kernel that computes linear attention token by token.
#include "step.cuh"

#include "launch.hpp"

FA_EMULATED(emulate_linear_step, fastattention_linear_step, StepParams, fastattention::kStepWarps,
            fastattention::Config::shared_bytes)
